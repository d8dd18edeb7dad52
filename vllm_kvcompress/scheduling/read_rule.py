"""Read rule: how much of its cache a decode step reads, such as `quest:0.25` or `quest:2048`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, Self

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import parse_number
from vllm_kvcompress.rounding import ceil_div

DEFAULT_MIN_TOKENS = 128
NEVER = 2**62  # more tokens than any request has
READ_HELP = (
    'use "quest:" with the part of the pages that is read, such as quest:0.25, or with tokens per '
    "KV head, such as quest:2048, and after commas global=32 and local=64, which are always read; "
    'or "longcache", after a colon global=32, local=4096, span=32 and top=64, and prefill=512 if '
    "chunks of prompts are to read a part, too; after commas score=bounds (default) with "
    "bounds=exact (default) or bounds=int8, or score=mean with parts=1, 2, 4 or 8 (2)"
)
_METHODS = ("quest", "longcache")
_CHOICES = {
    "score": ("bounds", "mean"),
    "parts": ("1", "2", "4", "8"),
    "bounds": ("exact", "int8"),
}
_NEEDED_SCORE = {"parts": "mean", "bounds": "bounds"}
_QUEST = {"global": 32, "local": 64}
_LONGCACHE = {"global": 32, "local": 4096, "span": 32, "top": 64, "prefill": 0}
_MAX_PAGES = 2**30  # more than any head has
_MAX_DENOMINATOR = 1000  # of fractions: integers give the same result on every device


class Share(NamedTuple):
    """Share of P pages that is read: `P * numerator / denominator`, rounded up, and `pages` more.

    The fields are integers, or arrays and tensors of them, so that host and device agree.
    """

    numerator: Any
    denominator: Any
    pages: Any

    def of(self, num_pages: Any) -> Any:
        """Counts the pages read out of `num_pages`, before bounds are applied."""
        return ceil_div(num_pages * self.numerator, self.denominator) + self.pages


@dataclass(frozen=True)
class ReadRule:
    """Pages that a KV head reads in a decode step, which follow from its length alone.

    Attributes:
        method: `quest` (Quest, arXiv 2406.10774, which always reads the last page alone) or
            `longcache` (ReAttention, arXiv 2407.15176).
        fraction: part of the head's pages, above 0 and at most 1; None: `tokens` is set.
        tokens: tokens per KV head, with those that are always read; None: `fraction` is set.
        score: score of a page: the highest bound on the queries' products with its keys (Quest,
            section 3.2), or the highest mean of these products.
        parts: equal parts of a page, of which the highest mean counts.
        bounds: type of the bounds: the cache's own (exact), or rounded outwards to 8 bits (int8).
        first_tokens, last_tokens: tokens at both ends that are always read, in full pages; the
            last page always is.
        min_tokens: length below which a head reads everything.
        prefill_tokens: tokens of a prompt chunk that chooses what it reads; 0: prefill reads
            everything.
    """

    method: str
    fraction: Fraction | None = None
    tokens: int | None = None
    score: str = "bounds"
    parts: int = 2
    bounds: str = "exact"
    first_tokens: int = 0
    last_tokens: int = 0
    min_tokens: int = DEFAULT_MIN_TOKENS
    prefill_tokens: int = 0

    @classmethod
    def parse(cls, text: str, min_tokens: int | None = None) -> Self:
        """Parses a rule from its text.

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
        """Returns this rule with another fraction, as a request may choose."""
        return replace(self, fraction=_part(fraction), tokens=None)

    def of_chunk(self, num_queries: int) -> Self:
        """Returns this rule for a prompt chunk, which reads itself as the last tokens."""
        more = max(0, num_queries - self.last_tokens)
        tokens = None if self.tokens is None else self.tokens + more
        return replace(self, tokens=tokens, last_tokens=self.last_tokens + more)

    @property
    def num_means(self) -> int:
        """Number of means by which a page is scored; 0: it has another score."""
        return self.parts if self.score == "mean" else 0

    def num_first(self, block_size: int) -> int:
        """Counts the pages at the beginning that are always read."""
        return ceil_div(self.first_tokens, block_size)

    def num_last(self, block_size: int) -> int:
        """Counts the pages at the end that are always read; a partial one has no bounds yet."""
        return max(1, ceil_div(self.last_tokens, block_size))

    def least_pages(self, block_size: int) -> int:
        """Counts the fewest pages that a head reads: those always read, and a chosen one."""
        return self.num_first(block_size) + self.num_last(block_size) + 1

    def share(self, block_size: int) -> Share:
        """Returns the share that a head of at least `min_tokens` reads, above `least_pages`."""
        if self.fraction is not None:
            return Share(self.fraction.numerator, self.fraction.denominator, 0)
        return Share(0, 1, min(ceil_div(self.tokens or 0, block_size), _MAX_PAGES))

    def read_pages(self, num_tokens: int, block_size: int) -> int:
        """Counts the pages that a head with `num_tokens` tokens reads."""
        num_pages = ceil_div(num_tokens, block_size)
        if num_tokens < self.min_tokens:
            return num_pages
        chosen: int = self.share(block_size).of(num_pages)
        return min(num_pages, max(chosen, self.least_pages(block_size)))

    def reads_less_from(self, block_size: int) -> int:
        """Returns the length from which a head reads fewer pages than it has, or NEVER."""
        most = self.least_pages(block_size)
        if self.fraction is None:
            most = max(most, self.share(block_size).pages)
        elif self.fraction >= 1:
            return NEVER
        else:  # ceil(P * n / d) < P where P * (d - n) >= d
            most = max(most, ceil_div(1, (1 - self.fraction)) - 1)
        return max(self.min_tokens, most * block_size + 1)

    def num_read_fully(self, num_prompt_tokens: int, block_size: int) -> int:
        """Counts leading tokens whose queries read everything: the prompt, and early output."""
        return max(num_prompt_tokens, self.reads_less_from(block_size) - 1)

    def most_pages(self, num_pages: int, block_size: int) -> int:
        """Counts the most pages that a head with at most `num_pages` pages reads."""
        short = ceil_div(self.min_tokens - 1, block_size)
        chosen: int = self.share(block_size).of(num_pages)
        return min(num_pages, max(chosen, short, self.least_pages(block_size)))


@dataclass(frozen=True)
class PromptChunks:
    """Chunks of a prompt, whose queries choose together what they read.

    tokens    0 ........... num_read_fully ....... + chunk ....... + chunk ... end
              [ reads all before  ][ one step      ][ one step      ][ one   ]
                it, any step sizes

    So a token's key and value follow from the tokens before it alone, whatever else is served.

    Attributes:
        size: tokens of a chunk, in full blocks; a prompt's last chunk may be shorter.
        num_read_fully: leading tokens of a prompt, whose chunks all read everything before them.
    """

    size: int
    num_read_fully: int

    @classmethod
    def of(cls, rule: ReadRule | None, block_size: int) -> Self | None:
        """Derives the chunks from a read rule; None: prefill reads everything."""
        if rule is None or not rule.prefill_tokens:
            return None
        size = ceil_div(rule.prefill_tokens, block_size) * block_size
        first_partial = rule.of_chunk(size).reads_less_from(block_size)
        return cls(size, (first_partial - 1) // size * size)

    def next_step(self, start: int, end: int, max_tokens: int) -> int:
        """Counts the tokens in [start, end) of a prompt that a step of `max_tokens` tokens reads.

        Returns 0 where the next chunk does not fit into this step.
        """
        if start < self.num_read_fully:
            return min(max_tokens, min(end, self.num_read_fully) - start)
        wanted = min(end, (start // self.size + 1) * self.size) - start
        return wanted if wanted <= max_tokens else 0

    def num_shared(self, num_tokens: int) -> int:
        """Counts leading tokens whose KV every prompt with the same `num_tokens` can share."""
        if num_tokens <= self.num_read_fully:
            return num_tokens
        return num_tokens // self.size * self.size


def _part(fraction: float) -> Fraction:
    smallest = Fraction(1, _MAX_DENOMINATOR)
    return max(Fraction(fraction).limit_denominator(_MAX_DENOMINATOR), smallest)


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
    for name, score in _NEEDED_SCORE.items():
        if name in choices and choices.setdefault("score", score) != score:
            raise ValueError(f"{name} goes with score={score}")
    if "parts" in choices:
        choices["parts"] = int(choices["parts"])
    if not numbers.get("span", 1) * numbers.get("top", 1):
        raise ValueError("expected span and top of at least 1")
    return choices, numbers
