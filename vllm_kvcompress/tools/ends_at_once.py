"""Imported by fork servers first: they end with their command, at once.

What they have imported is not taken apart, which is 2 s of CPU for vLLM's modules, several where
the machine is busy. They end in the middle of these imports, too.
"""

from __future__ import annotations

import atexit
import os

from vllm_kvcompress.vllm_plugin.startup.lifeline import end_with

atexit.register(os._exit, 0)  # behind all that is registered later
end_with(os.getppid())
