"""Words of a text with the probability that each is kept, and the text that a rate keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray


@dataclass(frozen=True)
class ScoredWords:
    """Words of one chunk of a text, in order.

    Attributes:
        starts, ends: [words] bounds of each word in the text, in characters.
        probabilities: [words] probability that it is to be kept, from 0 to 1.
        num_tokens: [words] tokens of the classifier.
    """

    starts: ndarray
    ends: ndarray
    probabilities: ndarray
    num_tokens: ndarray

    @classmethod
    def from_tokens(
        cls, spans: ndarray, probabilities: ndarray, begins: ndarray, forced: ndarray
    ) -> ScoredWords:
        """Joins tokens to words; a word's probability is the mean of its tokens' (section 3.3).

        Args:
            spans: [tokens, 2] bounds in characters, without spaces at the ends; may be empty.
            probabilities: [tokens] probability that each is to be kept.
            begins: [tokens] whether a token begins a word; the first one does.
            forced: [tokens] whether a token is always kept.
        """
        first = np.flatnonzero(begins)
        counts = np.diff(np.append(first, len(begins))).astype(np.int32)
        kept = np.where(forced, 1.0, probabilities)
        # Tokens without characters lie at the start of the next ones, or at the end of the last.
        starts = np.minimum.reduceat(spans[:, 0], first)
        ends = np.maximum.reduceat(spans[:, 1], first)
        return cls(starts, ends, np.add.reduceat(kept, first) / counts, counts)

    def kept(self, rate: float) -> ndarray:
        """[words] bool, true above the percentile of what is left out.

        Every word counts once per token, so that the rate is one of tokens.
        """
        of_tokens: ndarray = np.repeat(self.probabilities, self.num_tokens)
        threshold = np.percentile(of_tokens, min(100, int(100 * (1 - rate) + 1)))
        certain = (threshold == 1.0) & (self.probabilities == threshold)
        kept: ndarray = (self.probabilities > threshold) | certain
        return kept


@dataclass(frozen=True)
class ScoredText:
    """Words of a text, in the chunks that the classifier read.

    Attributes:
        num_tokens: tokens of the classifier.
        chunks: in order; none if the text is too short to be shortened.
        forced: [start, end) of characters that are always kept, besides words.
    """

    num_tokens: int
    chunks: tuple[ScoredWords, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()

    def shortened(self, text: str, rate: float) -> tuple[str, int]:
        """The kept part of the text, unchanged, and the number of tokens that its words have.

        A text of which nothing would be left, such as a single word, is kept.
        """
        if rate >= 1.0 or not self.chunks:
            return text, self.num_tokens
        spans, num_kept = list(self.forced), 0
        for words in self.chunks:
            kept = words.kept(rate)
            num_kept += int(words.num_tokens[kept].sum())
            spans += zip(words.starts[kept].tolist(), words.ends[kept].tolist(), strict=True)
        short = joined(text, sorted(spans))
        return (short, num_kept) if short.strip() else (text, self.num_tokens)


def joined(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Joins parts of a text: keeps white space between two parts, and puts a space for words.

    Spans are [start, end) of the parts, sorted by start; they may overlap.
    """
    parts: list[str] = []
    last = 0
    for start, end in spans:
        start = max(start, last)
        if start >= end:
            continue
        gap = text[last:start] if parts else ""
        if gap.strip():  # words are left out
            touches = parts[-1][-1].isspace() or text[start].isspace()
            gap = "" if touches else " "
        parts += [gap, text[start:end]] if gap else [text[start:end]]
        last = end
    return "".join(parts)


def chunk_bounds(is_end: Sequence[bool] | ndarray, most: int) -> list[tuple[int, int]]:
    """[start, end) of chunks, each ending at the last token of `is_end` within reach.

    As in the authors' package, a chunk may have one token more than `most`, and its end is searched
    back to its second token.
    """
    ends = np.asarray(is_end, dtype=bool)
    total, start, bounds = len(ends), 0, []
    while start + most <= total - 1:
        last = start + most
        end_tokens = np.flatnonzero(ends[start + 1 : last + 1])
        if len(end_tokens):
            last = start + 1 + int(end_tokens[-1])
        bounds.append((start, last + 1))
        start = last + 1
    return [*bounds, (start, total)] if start < total else bounds
