"""How much is kept, as users write it: `0.25` of the prompt, or `2048` tokens per KV head."""

from __future__ import annotations

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.triggers import parse_number

MOST_TOKENS = 2**53  # of anything


def parse_budget(value: object) -> float | int:
    """A budget from a flag's text or from YAML or JSON.

    Returns:
        A float in (0, 1], the kept fraction of the prompt; or an int, the kept tokens per head
        (in the mean over heads and layers).

    Raises:
        ConfigError: no number, not above zero, not finite, or ambiguous.
    """
    number = parse_number(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(
            f"budget: expected a number, found {value!r}; give a fraction of the prompt such as "
            "0.25, or tokens per head such as 2048."
        )
    if not 0 < number <= MOST_TOKENS:
        raise ConfigError(
            f"budget {value}: expected a positive, finite number, since something has to be kept; "
            "give a fraction of the prompt such as 0.25, or tokens per head such as 2048."
        )
    if isinstance(number, int) and number == 1:
        raise ConfigError(
            'budget 1 could mean "the whole prompt" or "one token"; write 1.0 to keep everything, '
            "or tokens per head such as 2048."
        )
    if isinstance(number, float) and number > 1:
        raise ConfigError(
            f"budget {value}: a fraction cannot exceed 1.0; write a whole number without a point "
            "for tokens per head, such as 2048."
        )
    return number
