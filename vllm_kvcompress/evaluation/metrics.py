"""Scores of replies, in [0, 1]."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str]], float]


def normalize(text: str) -> list[str]:
    """Words in lower case, without punctuation and English articles (SQuAD's normalisation)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def exact_match(reply: str, answers: Sequence[str]) -> float:
    """1 if the reply is one of the answers, up to normalisation."""
    said = normalize(reply)
    return float(any(said == normalize(answer) for answer in answers))


def contains_all(reply: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the reply as whole words (RULER's string match, all)."""
    return sum(_occurs(answer, reply) for answer in answers) / len(answers)


def contains_any(reply: str, answers: Sequence[str]) -> float:
    """1 if any answer occurs in the reply as whole words (RULER's string match, part)."""
    return float(any(_occurs(answer, reply) for answer in answers))


def f1(reply: str, answers: Sequence[str]) -> float:
    """Best F1 of the reply's words against an answer's (SQuAD, arXiv 1606.05250)."""
    return max(_f1(normalize(reply), normalize(answer)) for answer in answers)


def _occurs(answer: str, reply: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", reply.lower()) is not None


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "contains_all": contains_all,
    "contains_any": contains_any,
    "f1": f1,
}
