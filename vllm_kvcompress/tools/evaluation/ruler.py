"""Generates RULER's 13 tasks (arXiv 2404.06654) offline, with RULER's own prompts. No torch.

Prompts, counts and metrics are those of NVIDIA/RULER (Apache-2.0), with three differences: essays
and question-answering data are not ours to ship, so haystacks are `haystack.txt`, `qa_1` asks for
one made-up fact among documents of such facts, and `qa_2` for one that two documents tell together;
and words come from `words.txt` instead of the wonderwords package.
"""

from __future__ import annotations

import itertools
import json
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.item import Item

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_DEPTHS = 40  # places in a haystack where needles may lie


Build = Callable[[int, random.Random], Item]  # from the number of units of filling


@dataclass(frozen=True)
class Needles:
    """A needle-in-a-haystack task, as RULER's synthetic.yaml names its parts.

    Attributes:
        haystack: noise (one sentence group, repeated), text, or needles (others like the one).
        keys: words or uuids.
        values: numbers or uuids.
        num_keys, num_values, num_queries: needles with other keys; values per key; keys asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def build(self, size: int, rng: random.Random) -> Item:
        """A prompt with `size` sentences (or needles) of haystack."""
        num_keys = max(self.num_keys, self.num_queries)
        keys = distinct_keys(num_keys, rng, self.keys)
        pairs = [(key, self._value(rng)) for key in keys for _ in range(self.num_values)]
        asked = rng.sample(keys, self.num_queries)
        answers = tuple(value for key, value in pairs if key in asked)
        needles = [self._sentence(key, value) for key, value in pairs]
        filling = self._filling(size, keys, rng)
        places = sorted(
            (round(len(filling) * rng.randint(0, _DEPTHS) / _DEPTHS), rng.random(), needle)
            for needle in needles
        )
        depth = places[0][0] / max(1, len(filling)) if len(places) == 1 else None
        for place, _, needle in reversed(places):
            filling.insert(place, needle)
        return self._prompt(filling, asked, answers, depth)

    def _prompt(
        self, text: list[str], asked: list[str], answers: tuple[str, ...], depth: float | None
    ) -> Item:
        one = len(answers) == 1
        verb, wanted = ("is", "is the") if one else ("are", "are all the")
        return _prompt(
            "niah",
            answers,
            depth,
            some="A" if one else "Some",
            verb=verb,
            wanted=wanted,
            kind=self.values[:-1] if one else self.values,
            query=asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
            text=("\n" if self.haystack in ("noise", "needles") else " ").join(text),
        )

    def _sentence(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.values, key=key, value=value)

    def _value(self, rng: random.Random) -> str:
        return str(rng.randint(10**6, 10**7 - 1)) if self.values == "numbers" else _uuid(rng)

    def _filling(self, size: int, taken: list[str], rng: random.Random) -> list[str]:
        if self.haystack == "noise":
            return [NOISE] * size
        if self.haystack == "text":
            sentences = haystack()
            return [sentences[i % len(sentences)] for i in range(size)]
        keys = (key for key in iter(lambda: _key(self.keys, rng), "") if key not in taken)
        return [self._sentence(next(keys), self._value(rng)) for _ in range(size)]


def _variable_tracking(size: int, rng: random.Random) -> Item:
    """One chain of four assignments in noise; all five variables have the value."""
    names = _distinct(5, lambda: "".join(rng.choices(string.ascii_uppercase, k=5)))
    value = str(rng.randint(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names)]
    text = [NOISE] * size
    for number, place in enumerate(sorted(rng.randint(0, size) for _ in chain)):
        text.insert(place + number, chain[number])
    return _prompt("vt", tuple(names), text="\n".join(text), value=value, count=len(names))


def _common_words(size: int, rng: random.Random) -> Item:
    """Ten words thirty times each, `size` others (as far as there are any) three times each."""
    adjectives, nouns = _words()
    single = [*adjectives, *nouns]
    pairs = [f"{adjective}-{noun}" for adjective in adjectives for noun in nouns]
    rng.shuffle(single)
    rng.shuffle(pairs)
    common, others = single[:10], [*single[10:], *pairs][:size]
    listed = common * 30 + others * 3
    rng.shuffle(listed)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    return _prompt("cwe", tuple(common), text=numbered)


def _frequent_words(size: int, rng: random.Random) -> Item:
    """Coded words whose frequencies fall with the square of their rank; rank one is dots."""
    coded = _distinct(50, lambda: "".join(rng.choices(string.ascii_lowercase, k=6)))
    ranked = ["....", *coded]
    total = sum(rank**-2.0 for rank in range(1, len(ranked) + 1))
    # The three that are asked for differ in number even in the shortest text.
    least = {1: 4, 2: 3, 3: 2}
    counts = [
        max(least.get(i, 0), round(size * (i + 1) ** -2.0 / total)) for i in range(len(ranked))
    ]
    text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return _prompt("fwe", tuple(coded[:3]), text=" ".join(text))


def _question(hops: int) -> Build:
    """Builds tasks that ask for a fact among documents of such facts, of one or of two of them."""

    def build(size: int, rng: random.Random) -> Item:
        people = _distinct(2 * (size + 1), lambda: _name(rng))
        towns = [_name(rng) for _ in people]
        facts = [f"{person} grew up in {town}." for person, town in zip(people, towns, strict=True)]
        asked = rng.randrange(len(people) // 2)
        question = f"Where did {people[asked]} grow up?"
        if hops == 2:
            pupils = _distinct(len(people), lambda: _name(rng))
            facts += [f"{b} was taught by {a}." for a, b in zip(people, pupils, strict=True)]
            question = f"Where did the teacher of {pupils[asked]} grow up?"
        rng.shuffle(facts)
        documents = "\n\n".join(f"Document {i}:\n{fact}" for i, fact in enumerate(facts, 1))
        return _prompt("qa", (towns[asked],), text=documents, query=question)

    return build


TASKS: dict[str, Build] = {
    "niah_single_1": Needles("noise").build,
    "niah_single_2": Needles("text").build,
    "niah_single_3": Needles("text", values="uuids").build,
    "niah_multikey_1": Needles("text", num_keys=4).build,
    "niah_multikey_2": Needles("needles").build,
    "niah_multikey_3": Needles("needles", keys="uuids", values="uuids").build,
    "niah_multivalue": Needles("text", num_values=4).build,
    "niah_multiquery": Needles("text", num_queries=4).build,
    "vt": _variable_tracking,
    "cwe": _common_words,
    "fwe": _frequent_words,
    "qa_1": _question(hops=1),
    "qa_2": _question(hops=2),
}


def generate(task: str, num_tokens: int, seed: int, count_tokens: Callable[[str], int]) -> Item:
    """The longest prompt of a task that fits with its reply.

    Args:
        task: one of TASKS.
        num_tokens: of prompt and reply together, as RULER counts them.
        seed: seed of the draws; with another length, other words.
        count_tokens: number of tokens of a text.

    Raises:
        ConfigError: not even the shortest fits.
    """

    def build(size: int) -> Item:
        return TASKS[task](size, random.Random(f"{task}/{num_tokens}/{seed}"))

    def fits(size: int) -> bool:
        prompt = build(size)
        text = f"{prompt.context}\n{prompt.question}{prompt.answer_prefix}"
        return count_tokens(text) + prompt.max_tokens <= num_tokens

    low, high = 1, 2
    if not fits(low):
        raise ConfigError(f"--lengths {num_tokens}: too short for ruler/{task}; give more tokens.")
    while fits(high) and high < num_tokens:
        low, high = high, 2 * high
    while high - low > max(1, low // 100):  # to one part in a hundred
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(build(low), task=f"ruler/{task}", length=num_tokens)


def _prompt(
    task: str, answers: tuple[str, ...], depth: float | None = None, **texts: object
) -> Item:
    """Fills in RULER's own texts, those of `ruler_prompts.json`."""
    fields: dict[str, Any] = {
        name: text.format(**texts) if isinstance(text, str) else text
        for name, text in _TEMPLATES[task].items()
    }
    return Item(**fields, answers=answers, depth=depth)


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


_TEMPLATES: dict[str, dict[str, Any]] = json.loads(_file("ruler_prompts.json"))


@cache
def haystack() -> list[str]:
    """The sentences of `haystack.txt`."""
    text = _file("haystack.txt")
    return [f"{sentence.strip().rstrip('.')}." for sentence in text.split(". ") if sentence.strip()]


@cache
def _words() -> tuple[list[str], list[str]]:
    adjectives, nouns = _file("words.txt").splitlines()
    return adjectives.split(), nouns.split()


def distinct_keys(number: int, rng: random.Random, kind: str = "words") -> list[str]:
    """Draws `number` different needle keys, words or uuids."""
    return _distinct(number, lambda: _key(kind, rng))


def _key(kind: str, rng: random.Random) -> str:
    if kind == "uuids":
        return _uuid(rng)
    adjectives, nouns = _words()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _name(rng: random.Random) -> str:
    """A made-up name of three syllables."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).title()


def _distinct(number: int, draw: Callable[[], str]) -> list[str]:
    """The first `number` different draws, in order."""
    distinct: dict[str, None] = {}
    while len(distinct) < number:
        distinct[draw()] = None
    return list(distinct)
