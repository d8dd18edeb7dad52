"""The debug mode KVCOMPRESS_CHECK=1: whose every block is, checked in every step.

The scheduler checks its bookkeeping after every step, and sends along whose every block is. Workers
check what attention and events read and write against that, and poison blocks that nobody may read
with NaN, so that a stale read shows in an output. Whatever is found ends the engine.
"""

from __future__ import annotations

import os

from vllm_kvcompress.errors import ConfigError

VARIABLE = "KVCOMPRESS_CHECK"
_VALUES = {"": False, "0": False, "1": True}


def switched_on() -> bool:
    """Whether this process checks.

    Raises:
        ConfigError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in _VALUES:
        raise ConfigError(f"{VARIABLE}={value}: expected 1 or 0; set one, or unset it.")
    return _VALUES[value]
