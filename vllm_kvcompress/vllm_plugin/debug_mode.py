"""The debug mode KVCOMPRESS_CHECK=1, which checks the owners of blocks in every step.

The scheduler checks its ledger after every step and sends every block's owner along. Workers check
that attention and events touch only blocks of their own request, and fill blocks without a reader
with NaN, so that a stale read shows in an output. A violation ends the engine.
"""

from __future__ import annotations

import os

from vllm_kvcompress.errors import ConfigError

VARIABLE = "KVCOMPRESS_CHECK"
_VALUES = {"": False, "0": False, "1": True}


def switched_on() -> bool:
    """Whether the debug mode is on in this process.

    Raises:
        ConfigError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in _VALUES:
        raise ConfigError(f"{VARIABLE}={value}: expected 1 or 0; set one, or unset it.")
    return _VALUES[value]
