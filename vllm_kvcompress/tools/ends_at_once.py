"""Ends a fork server together with its command, at once; preloaded before everything else.

Taking vLLM's modules apart at exit would cost 2 s of CPU. The import of vLLM is ended, too.
"""

from __future__ import annotations

import atexit
import os

from vllm_kvcompress.vllm_plugin.startup.lifeline import end_with

atexit.register(os._exit, 0)  # behind all that is registered later
end_with(os.getppid())
