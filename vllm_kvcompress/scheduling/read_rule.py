"""How much of what is held a decode step reads, as users write it: `quest:0.25`, `quest:2048`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, Self

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import parse_number
from vllm_kvcompress.rounding import ceil_div

DEFAULT_MIN_TOKENS = 128
NEVER = 2**62  # tokens that no request has
READ_HELP = (
    'use "quest:" with the part of the pages that is read, such as quest:0.25, or with tokens per '
    "KV head, such as quest:2048, and after commas global=32 and local=64, which are always read; "
    'or "longcache", after a colon global=32, local=4096, span=32 and top=64, and prefill=512 if '
    "chunks of prompts are to read a part, too; after commas "
    "group=max (default) or group=mean, and score=bounds (default) with bounds=exact (default) or "
    "bounds=int8, score=mean with parts=1, 2, 4 or 8 (2), or score=keys"
)
_METHODS = ("quest", "longcache")
_CHOICES = {
    "group": ("max", "mean"),
    "score": ("bounds", "mean", "keys"),
    "parts": ("1", "2", "4", "8"),
    "bounds": ("exact", "int8"),
}
_ONLY_OF = {"parts": "mean", "bounds": "bounds"}  # scores
_QUEST = {"global": 32, "local": 64}
_LONGCACHE = {"global": 32, "local": 4096, "span": 32, "top": 64, "prefill": 0}
_MOST_PAGES = 2**30  # more than any head has
_FINEST = 1000  # of a fraction: whole numbers say the same on every device


class Share(NamedTuple):
    """What is read of P pages: `P * numerator / denominator` of them, rounded up, and `pages` more.

    Whole numbers, or arrays and tensors of them, so that host and device say the same.
    """

    numerator: Any
    denominator: Any
    pages: Any

    def of(self, num_pages: Any) -> Any:
        """Pages out of `num_pages`, without bounds; for ints, numpy arrays and tensors."""
        return ceil_div(num_pages * self.numerator, self.denominator) + self.pages


@dataclass(frozen=True)
class ReadRule:
    """Pages that a KV head reads in a decode step, which follow from its length alone.

    Attributes:
        method: `quest` (Quest, arXiv 2406.10774, which always reads the last page alone) or
            `longcache` (ReAttention, arXiv 2407.15176).
        fraction: part of the head's pages, above 0 and at most 1; None: `tokens` says it.
        tokens: tokens per KV head, those that are always read included; None: `fraction` says it.
        group: how the query heads that share a KV head agree: max or mean of their products.
        score: of a page: bounds on the queries' products with its keys (Quest, section 3.2); the
            mean of these products; or the highest of them itself, for which all keys are read.
        parts: of a page, equal ones, whose highest mean counts.
        bounds: in the cache's own numbers (exact), or rounded outwards to 8 bits (int8).
        first_tokens, last_tokens: that are always read, in whole pages, the last page among them.
        min_tokens: heads with fewer read everything.
        prefill_tokens: of the chunks of a prompt that each choose what they read; 0: prompts are
            read whole.
    """

    method: str
    fraction: Fraction | None = None
    tokens: int | None = None
    group: str = "max"
    score: str = "bounds"
    parts: int = 2
    bounds: str = "exact"
    first_tokens: int = 0
    last_tokens: int = 0
    min_tokens: int = DEFAULT_MIN_TOKENS
    prefill_tokens: int = 0

    @classmethod
    def parse(cls, text: str, min_tokens: int | None = None) -> Self:
        """A rule from its text.

        Raises:
            ConfigError: no such method, or an amount or option that cannot work.
        """
        try:
            return cls._parse(text, DEFAULT_MIN_TOKENS if min_tokens is None else min_tokens)
        except ValueError as error:
            raise ConfigError(f'"{text}": {error}; {READ_HELP}.') from None

    @classmethod
    def _parse(cls, text: str, min_tokens: int) -> Self:
        method, _, rest = text.strip().partition(":")
        options = [word.strip() for word in rest.split(",")] if rest else []
        if method not in _METHODS:
            raise ValueError(f'no method "{method}"')
        fraction: Fraction | None = None
        tokens: int | None = None
        if method == "quest":
            amount, *options = options or [""]
            fraction, tokens = _amount(amount)
            choices, numbers = _options(options, _QUEST)
        else:
            choices, numbers = _options(options, _LONGCACHE)
            tokens = numbers["global"] + numbers["local"] + numbers["span"] * numbers["top"]
        first, last = numbers["global"], numbers["local"]
        return cls(
            method,
            fraction,
            tokens,
            first_tokens=first,
            last_tokens=last,
            min_tokens=min_tokens,
            prefill_tokens=numbers.get("prefill", 0),
            **choices,
        )

    def reading(self, fraction: float) -> Self:
        """The same for a request that reads another part of its pages."""
        return replace(self, fraction=_part(fraction), tokens=None)

    def of_chunk(self, num_queries: int) -> Self:
        """The same for a chunk of a prompt, all of which is among the last tokens."""
        more = max(0, num_queries - self.last_tokens)
        tokens = None if self.tokens is None else self.tokens + more
        return replace(self, tokens=tokens, last_tokens=self.last_tokens + more)

    @property
    def num_means(self) -> int:
        """By which pages are ranked; 0: by something else."""
        return self.parts if self.score == "mean" else 0

    def num_first(self, block_size: int) -> int:
        """Pages at the beginning that are always read."""
        return ceil_div(self.first_tokens, block_size)

    def num_last(self, block_size: int) -> int:
        """Pages at the end that are always read; one may not be full, and has no bounds yet."""
        return max(1, ceil_div(self.last_tokens, block_size))

    def least_pages(self, block_size: int) -> int:
        """Pages of a head that reads a part: those that are always read, and one that is chosen."""
        return self.num_first(block_size) + self.num_last(block_size) + 1

    def share(self, block_size: int) -> Share:
        """Of a head's pages, with enough tokens and apart from `least_pages`."""
        if self.fraction is not None:
            return Share(self.fraction.numerator, self.fraction.denominator, 0)
        return Share(0, 1, min(ceil_div(self.tokens or 0, block_size), _MOST_PAGES))

    def read_pages(self, num_tokens: int, block_size: int) -> int:
        """Pages that a head with so many tokens reads."""
        num_pages = ceil_div(num_tokens, block_size)
        if num_tokens < self.min_tokens:
            return num_pages
        chosen: int = self.share(block_size).of(num_pages)
        return min(num_pages, max(chosen, self.least_pages(block_size)))

    def reads_less_from(self, block_size: int) -> int:
        """Tokens from which on a head reads fewer pages than it has; NEVER: it never does."""
        most = self.least_pages(block_size)
        if self.fraction is None:
            most = max(most, self.share(block_size).pages)
        elif self.fraction >= 1:
            return NEVER
        else:  # ceil(P * n / d) < P where P * (d - n) >= d
            most = max(most, ceil_div(1, (1 - self.fraction)) - 1)
        return max(self.min_tokens, most * block_size + 1)

    def num_whole(self, num_prompt_tokens: int, block_size: int) -> int:
        """Tokens at a request's beginning that read everything before them: its prompt, and what
        is generated as long as that is short."""
        return max(num_prompt_tokens, self.reads_less_from(block_size) - 1)

    def most_pages(self, num_pages: int, block_size: int) -> int:
        """Most pages that any head with at most `num_pages` reads, shorter ones included."""
        short = ceil_div(self.min_tokens - 1, block_size)
        chosen: int = self.share(block_size).of(num_pages)
        return min(num_pages, max(chosen, short, self.least_pages(block_size)))


def _part(fraction: float) -> Fraction:
    return max(Fraction(fraction).limit_denominator(_FINEST), Fraction(1, _FINEST))


def _amount(text: str) -> tuple[Fraction | None, int | None]:
    """`fraction` and `tokens` of a rule, one of them None."""
    number = parse_number(text)
    if isinstance(number, float) and 0 < number <= 1:
        return _part(number), None
    if isinstance(number, int) and 0 < number < 2**53:
        return None, number
    raise ValueError(f'expected a fraction of at most 1.0, or a number of tokens, found "{text}"')


def _options(options: list[str], numbers: dict[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """Parses enum and integer options, with defaults."""
    choices: dict[str, Any] = {}
    numbers = dict(numbers)
    for option in options:
        name, _, value = option.partition("=")
        if value in _CHOICES.get(name, ()):
            choices[name] = value
        elif name in numbers and value.isdecimal() and len(value) < 10:
            numbers[name] = int(value)
        else:
            raise ValueError(f'unknown option "{option}"')
    for name, score in _ONLY_OF.items():
        if name in choices and choices.setdefault("score", score) != score:
            raise ValueError(f"{name} goes with score={score}")
    if "parts" in choices:
        choices["parts"] = int(choices["parts"])
    if not numbers.get("span", 1) * numbers.get("top", 1):
        raise ValueError("expected span and top of at least 1")
    return choices, numbers
