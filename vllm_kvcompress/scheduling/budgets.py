"""Budget: how much is kept, such as `0.25` of the prompt, or `2048` tokens per KV head.

Users may also say how much may be lost, such as `loss:0.02`. Commands turn that into a fraction
before anything else sees it, since a calibration has to be read for it.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import PlainValidator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import MAX_TOKENS, parse_number

LOSS_PREFIX = "loss:"


def parse_budget(value: object) -> float | int:
    """Parses a budget from a flag's text, or from YAML or JSON.

    Returns:
        A float in (0, 1], the kept fraction of the prompt; or an int, the kept tokens per head
        (in the mean over heads and layers).

    Raises:
        ConfigError: no such number, or 1, which could mean the whole prompt or one token.
    """
    number = parse_number(value) if isinstance(value, str) else value
    if isinstance(number, float) and 0 < number <= 1:
        return number
    if isinstance(number, int) and not isinstance(number, bool) and 1 < number <= MAX_TOKENS:
        return number
    if parse_loss(value) is not None:
        raise ConfigError(
            f"expected a budget that says how much is kept, found {value!r}, which says how much "
            "may be lost; `vllm-kvcompress serve`, eval and bench turn it into one (serve "
            "--print-vllm-command prints it)."
        )
    raise ConfigError(
        "expected a budget: a fraction of the prompt above 0 and at most 1.0, such as 0.25, or "
        f"tokens per KV head, a whole number of at least 2, such as 2048; found {value!r}."
    )


def parse_loss(value: object) -> float | None:
    """Parses a budget by loss, `loss:F`; None: it is a budget of another kind.

    Returns:
        The most that may be lost in the mean, in nats per token.

    Raises:
        ConfigError: F is no number above 0.
    """
    if not isinstance(value, str) or not value.strip().startswith(LOSS_PREFIX):
        return None
    limit = parse_number(value.strip().removeprefix(LOSS_PREFIX))
    if isinstance(limit, str) or not 0 < limit < math.inf:
        raise ConfigError(
            f"expected {LOSS_PREFIX}F with nats per token above 0, such as {LOSS_PREFIX}0.02; "
            f"found {value!r}."
        )
    return float(limit)


Budget = Annotated[float | int, PlainValidator(parse_budget)]
