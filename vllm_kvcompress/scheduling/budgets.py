"""Budget: how much is kept, such as `0.25` of the prompt, or `2048` tokens per KV head."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import MAX_TOKENS, parse_number


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
    raise ConfigError(
        "expected a budget: a fraction of the prompt above 0 and at most 1.0, such as 0.25, or "
        f"tokens per KV head, a whole number of at least 2, such as 2048; found {value!r}."
    )


Budget = Annotated[float | int, PlainValidator(parse_budget)]
