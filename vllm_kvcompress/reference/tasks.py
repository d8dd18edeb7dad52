"""Synthetic retrieval tasks in RULER's families, word by word, seeded. No torch.

| family | context | question | answer |
|---|---|---|---|
| single | noise with one fact `k3 v7 w9` | find k3 | k3 v7 w9 |
| multikey | facts only | find k3 | k3 v7 w9 |
| multivalue | `k3 v7` and, far from it, `k3 w9`, among others | gather k3 | k3 v7 k3 w9 |
| multiquery | facts only | find k3 k5 | k3 v7 w9 k5 v1 w2 |
| tracking | chains `x5 x2`, `x2 x8`, `x8 v4`, shuffled | trace x5 | x5 x2 x8 v4 |
| frequent | words, three of them often | count | the three, most frequent first |
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

FAMILIES = ("single", "multikey", "multivalue", "multiquery", "tracking", "frequent")

KEYS = tuple(f"k{i}" for i in range(256))
FIRST_VALUES = tuple(f"v{i}" for i in range(128))
SECOND_VALUES = tuple(f"w{i}" for i in range(128))
VARIABLES = tuple(f"x{i}" for i in range(256))
COUNTED = tuple(f"f{i}" for i in range(128))
NOISE = tuple(f"n{i}" for i in range(64))
STOP = "."
ASK = ("find", "gather", "trace", "count")
VOCABULARY = (*ASK, STOP, *KEYS, *FIRST_VALUES, *SECOND_VALUES, *VARIABLES, *COUNTED, *NOISE)

FREQUENT_SHARES = (0.32, 0.18, 0.09)
CHAIN_HOPS = 3


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        family: one of FAMILIES.
        context: words, separated by spaces.
        question: a few words.
        answer: the full expected reply.
        answers: the words that the reply has to contain.
    """

    family: str
    context: str
    question: str
    answer: str
    answers: tuple[str, ...]


@dataclass
class Scene:
    """A context with everything that can be asked about it, as lists of words."""

    words: list[str]
    questions: list[tuple[list[str], list[str]]]


def generate_scene(family: str, num_tokens: int, rng: random.Random) -> Scene:
    """A context of at most `num_tokens` words, and all its questions with their answers."""
    if family not in _SCENES:
        raise ValueError(f"unknown family {family!r}; families are {', '.join(FAMILIES)}")
    return _SCENES[family](num_tokens, rng)


def generate_sample(family: str, num_tokens: int, seed: int) -> Sample:
    """One question about a context of at most `num_tokens` words; the same for the same seed.

    Raises:
        ValueError: an unknown family, or too few tokens for it (64 are enough for all).
    """
    if num_tokens < 64:
        raise ValueError(f"num_tokens: expected at least 64, got {num_tokens}")
    rng = random.Random(f"{family}/{num_tokens}/{seed}")
    scene = generate_scene(family, num_tokens, rng)
    question, answer = rng.choice(scene.questions)
    wanted = tuple(dict.fromkeys(word for word in answer if word not in question))
    return Sample(family, " ".join(scene.words), " ".join(question), " ".join(answer), wanted)


def score(sample: Sample, reply: str) -> float:
    """Fraction of the wanted words that the reply contains, in [0, 1]."""
    said = set(reply.split())
    return sum(word in said for word in sample.answers) / len(sample.answers)


def _facts(num: int, rng: random.Random) -> list[list[str]]:
    keys = rng.sample(KEYS, num)
    return [[key, rng.choice(FIRST_VALUES), rng.choice(SECOND_VALUES), STOP] for key in keys]


def _flatten(groups: list[list[str]]) -> list[str]:
    return [word for group in groups for word in group]


def _find(fact: list[str]) -> tuple[list[str], list[str]]:
    return ["find", fact[0]], fact[:3]


def _single(num_tokens: int, rng: random.Random) -> Scene:
    facts = _facts(1, rng)
    words = [rng.choice(NOISE) for _ in range(num_tokens - 4)]
    place = rng.randrange(len(words) + 1)
    return Scene(words[:place] + facts[0] + words[place:], [_find(facts[0])])


def _multikey(num_tokens: int, rng: random.Random) -> Scene:
    facts = _facts(min(len(KEYS), num_tokens // 4), rng)
    return Scene(_flatten(facts), [_find(fact) for fact in facts])


def _multivalue(num_tokens: int, rng: random.Random) -> Scene:
    keys = rng.sample(KEYS, min(len(KEYS), num_tokens // 6))
    pairs = [(key, rng.choice(FIRST_VALUES), rng.choice(SECOND_VALUES)) for key in keys]
    groups = [[key, value, STOP] for key, *values in pairs for value in values]
    rng.shuffle(groups)
    questions = [(["gather", key], [key, first, key, second]) for key, first, second in pairs]
    return Scene(_flatten(groups), questions)


def _multiquery(num_tokens: int, rng: random.Random) -> Scene:
    facts = _facts(min(len(KEYS), num_tokens // 4), rng)
    rng.shuffle(facts)
    questions = []
    for start in range(0, len(facts) - 1, 2):
        pair = rng.sample(facts, 2)
        questions.append((["find", pair[0][0], pair[1][0]], pair[0][:3] + pair[1][:3]))
        del start
    return Scene(_flatten(facts), questions)


def _tracking(num_tokens: int, rng: random.Random) -> Scene:
    num_chains = max(1, min(len(VARIABLES) // CHAIN_HOPS, num_tokens // (3 * CHAIN_HOPS)))
    names = rng.sample(VARIABLES, CHAIN_HOPS * num_chains)
    groups, questions = [], []
    for start in range(0, len(names), CHAIN_HOPS):
        chain = [*names[start : start + CHAIN_HOPS], rng.choice(FIRST_VALUES)]
        groups += [[a, b, STOP] for a, b in itertools.pairwise(chain)]
        questions.append((["trace", chain[0]], chain))
    rng.shuffle(groups)
    return Scene(_flatten(groups), questions)


def _frequent(num_tokens: int, rng: random.Random) -> Scene:
    often = rng.sample(COUNTED, len(FREQUENT_SHARES))
    rare = [word for word in COUNTED if word not in often]
    words = _flatten(
        [
            [word] * int(share * num_tokens)
            for word, share in zip(often, FREQUENT_SHARES, strict=True)
        ]
    )
    words += [rng.choice(rare) for _ in range(num_tokens - len(words))]
    rng.shuffle(words)
    return Scene(words, [(["count"], often)])


_SCENES: dict[str, Callable[[int, random.Random], Scene]] = {
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "tracking": _tracking,
    "frequent": _frequent,
}
