"""Synthetic retrieval tasks in RULER's families, word by word, seeded. No torch.

| family | context | question | answer |
|---|---|---|---|
| single | noise with one fact `k3 v7 w9` | find k3 | k3 v7 w9 |
| multikey | 4 to 64 such facts in noise | find k3 | k3 v7 w9 |
| multivalue | `k3 v7` and elsewhere `k3 w9`, among others, in noise | gather k3 | k3 v7 k3 w9 |
| multiquery | 4 to 64 facts in noise | find k3 k5 | k3 v7 w9 k5 v1 w2 |
| tracking | chains `x5 x2`, `x2 x8`, `x8 v4`, shuffled, in noise | trace x5 | x5 x2 x8 v4 |
| frequent | words f, g and h, one of each kind often | count | those: f3 g7 h1 |
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

FAMILIES = ("single", "multikey", "multivalue", "multiquery", "tracking", "frequent")

KEYS = tuple(f"k{i}" for i in range(64))
FIRST_VALUES = tuple(f"v{i}" for i in range(32))
SECOND_VALUES = tuple(f"w{i}" for i in range(32))
VARIABLES = tuple(f"x{i}" for i in range(64))
COUNTED = tuple(tuple(f"{kind}{i}" for i in range(24)) for kind in "fgh")
NOISE = tuple(f"n{i}" for i in range(16))
STOP = "."
ASK = ("find", "gather", "trace", "count")
VOCABULARY = (
    *ASK,
    STOP,
    *KEYS,
    *FIRST_VALUES,
    *SECOND_VALUES,
    *VARIABLES,
    *COUNTED[0],
    *COUNTED[1],
    *COUNTED[2],
    *NOISE,
)

FREQUENT_SHARE = 0.4
MAX_FACTS = 64
CHAIN_HOPS = 3


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        family: one of FAMILIES.
        context: words, separated by spaces; exactly as many as were asked for.
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
    """A context with all questions about it and their answers, as lists of words."""

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


def _facts(num: int, rng: random.Random) -> list[list[str]]:
    keys = rng.sample(KEYS, num)
    return [[key, rng.choice(FIRST_VALUES), rng.choice(SECOND_VALUES), STOP] for key in keys]


def _flatten(groups: list[list[str]]) -> list[str]:
    return [word for group in groups for word in group]


def _num_facts(num_tokens: int, words_each: int, rng: random.Random) -> int:
    """Draws how many facts: up to MAX_FACTS, and at least half of a long context is noise."""
    most = min(MAX_FACTS, max(4, num_tokens // (2 * words_each)))
    return rng.randint(min(4, most), max(4, most))


def _in_noise(groups: list[list[str]], num_tokens: int, rng: random.Random) -> list[str]:
    """Groups in order, with noise words between them, `num_tokens` words in all."""
    num_noise = num_tokens - sum(map(len, groups))
    places = sorted(rng.randint(0, len(groups)) for _ in range(num_noise))
    gaps: list[list[str]] = [[] for _ in range(len(groups) + 1)]
    for place in places:
        gaps[place].append(rng.choice(NOISE))
    return _flatten([part for pair in zip(gaps, [*groups, []], strict=True) for part in pair])


def _find(fact: list[str]) -> tuple[list[str], list[str]]:
    return ["find", fact[0]], fact[:3]


def _single(num_tokens: int, rng: random.Random) -> Scene:
    facts = _facts(1, rng)
    return Scene(_in_noise(facts, num_tokens, rng), [_find(facts[0])])


def _multikey(num_tokens: int, rng: random.Random) -> Scene:
    facts = _facts(_num_facts(num_tokens, 4, rng), rng)
    return Scene(_in_noise(facts, num_tokens, rng), [_find(fact) for fact in facts])


def _multivalue(num_tokens: int, rng: random.Random) -> Scene:
    keys = rng.sample(KEYS, _num_facts(num_tokens, 6, rng))
    pairs = [(key, rng.choice(FIRST_VALUES), rng.choice(SECOND_VALUES)) for key in keys]
    groups = [[key, value, STOP] for key, *values in pairs for value in values]
    rng.shuffle(groups)
    questions = [(["gather", key], [key, first, key, second]) for key, first, second in pairs]
    return Scene(_in_noise(groups, num_tokens, rng), questions)


def _multiquery(num_tokens: int, rng: random.Random) -> Scene:
    facts = _facts(_num_facts(num_tokens, 4, rng), rng)
    questions = []
    for _ in range(len(facts) // 2):
        first, second = rng.sample(facts, 2)
        questions.append((["find", first[0], second[0]], first[:3] + second[:3]))
    return Scene(_in_noise(facts, num_tokens, rng), questions)


def _tracking(num_tokens: int, rng: random.Random) -> Scene:
    num_chains = max(2, _num_facts(num_tokens, 4, rng) // CHAIN_HOPS)
    names = rng.sample(VARIABLES, CHAIN_HOPS * num_chains)
    groups, questions = [], []
    for start in range(0, len(names), CHAIN_HOPS):
        chain = [*names[start : start + CHAIN_HOPS], rng.choice(FIRST_VALUES)]
        groups += [[a, b, STOP] for a, b in itertools.pairwise(chain)]
        questions.append((["trace", chain[0]], chain))
    rng.shuffle(groups)
    return Scene(_in_noise(groups, num_tokens, rng), questions)


def _frequent(num_tokens: int, rng: random.Random) -> Scene:
    often, words = [], []
    for kind, names in enumerate(COUNTED):
        num_words = num_tokens // 3 + (kind < num_tokens % 3)
        often.append(rng.choice(names))
        rare = [name for name in names if name != often[-1]]
        num_often = int(FREQUENT_SHARE * num_words)
        words += [often[-1]] * num_often
        words += [rng.choice(rare) for _ in range(num_words - num_often)]
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
