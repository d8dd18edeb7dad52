"""Imported by fork servers first: they end without taking apart what they have imported.

That is 2 s of CPU for vLLM's modules, several where the machine is busy, after a command's end.
"""

from __future__ import annotations

import atexit
import os

atexit.register(os._exit, 0)  # behind all that is registered later
