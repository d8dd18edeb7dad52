"""How much of what is held a decode step reads, as users write it: `quest:0.25`, `quest:2048`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.triggers import parse_number

DEFAULT_MIN_TOKENS = 128
LEAST_PAGES = 2  # the tail's last page, which is always read, and one that is chosen
READ_HELP = (
    'use "quest:" with the part of the pages that is read, such as quest:0.25, or with tokens per '
    "KV head, such as quest:2048; after a comma group=max (default) or group=mean"
)
_METHODS = ("quest",)
_GROUPS = ("max", "mean")
_FINEST = 1000  # of a fraction: whole numbers say the same on every device


@dataclass(frozen=True)
class ReadRule:
    """Pages that a KV head reads in a decode step, which follow from its length alone.

    Attributes:
        method: what chooses them; quest: bounds on the queries' products with a page's keys
            (Quest, arXiv 2406.10774, eq. of section 3.2).
        fraction: part of the head's pages, above 0 and at most 1; None: `tokens` says it.
        tokens: tokens per KV head; None: `fraction` says it.
        group: how the query heads that share a KV head agree: max or mean of their bounds.
        min_tokens: heads with fewer read everything.
    """

    method: str
    fraction: Fraction | None = None
    tokens: int | None = None
    group: str = "max"
    min_tokens: int = DEFAULT_MIN_TOKENS

    @classmethod
    def parse(cls, text: str, min_tokens: int | None = None) -> Self:
        """A rule from its text.

        Raises:
            ConfigError: no such method, or an amount or option that cannot work.
        """
        words, *options = str(text).split(",")
        method, _, amount = words.strip().partition(":")
        if method not in _METHODS:
            raise ConfigError(f'read "{text}": no method "{method}"; {READ_HELP}.')
        number = parse_number(amount)
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not 0 < number < 2**53
        ):
            raise ConfigError(f'read "{text}": expected an amount, found "{amount}"; {READ_HELP}.')
        if isinstance(number, float) and number > 1:
            raise ConfigError(
                f'read "{text}": a fraction cannot exceed 1.0; write a whole number without a '
                "point for tokens per KV head."
            )
        fraction = tokens = None
        if isinstance(number, int):
            tokens = number
        else:
            fraction = max(Fraction(number).limit_denominator(_FINEST), Fraction(1, _FINEST))
        group = _GROUPS[0]
        for option in options:
            name, _, group = option.strip().partition("=")
            if name != "group" or group not in _GROUPS:
                raise ConfigError(f'read "{text}": unknown option "{option.strip()}"; {READ_HELP}.')
        least = DEFAULT_MIN_TOKENS if min_tokens is None else min_tokens
        return cls(method, fraction, tokens, group, least)

    def chosen_pages(self, num_pages: Any, block_size: int) -> Any:
        """Pages out of `num_pages` that are read of a head with enough tokens, without bounds.

        Whole numbers, so that host and device say the same; for ints, numpy arrays and tensors.
        """
        if self.fraction is not None:
            return -(-(num_pages * self.fraction.numerator) // self.fraction.denominator)
        return num_pages * 0 + -(-(self.tokens or 0) // block_size)

    def read_pages(self, num_tokens: int, block_size: int) -> int:
        """Pages that a head with so many tokens reads."""
        num_pages = -(-num_tokens // block_size)
        if num_tokens < self.min_tokens:
            return num_pages
        chosen: int = max(self.chosen_pages(num_pages, block_size), LEAST_PAGES)
        return min(num_pages, chosen)

    def reads_less(self, num_tokens: int, block_size: int) -> bool:
        """Whether a head with so many tokens reads fewer pages than it has."""
        return self.read_pages(num_tokens, block_size) < -(-num_tokens // block_size)

    def most_pages(self, num_pages: int, block_size: int) -> int:
        """Most pages that any head with at most `num_pages` reads, shorter ones included."""
        short = -(-(self.min_tokens - 1) // block_size)
        chosen: int = self.chosen_pages(num_pages, block_size)
        return min(num_pages, max(chosen, short, LEAST_PAGES))
