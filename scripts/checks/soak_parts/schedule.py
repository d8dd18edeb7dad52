"""The schedule of requests: request i is a function of the seed and i alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from soak_parts.asks import Ask
from soak_parts.models import PRINTABLE
from soak_parts.setups import MERGING, MIN_CEILING, SETUPS, Setup
from soak_parts.tenants import tenant_ask

BLOCK = 32
ALONE_SHARE, REFUSED_SHARE, CUT_SHARE = 0.02, 0.04, 0.08
LONGEST = 4  # answers, in means; longer ones would have the engine for themselves at the end
SHORT_SHARE, SHORT = 0.8, 40  # of the prompts in a storm, and their tokens at most
NUM_DOCUMENTS = 6  # that several requests of a setup share
WRONG: tuple[dict[str, Any], ...] = (
    {"kv_budget": 2},
    {"kv_context_tokens": -3},
    {"kv_context_tokens": 1.5},
    {"kv_policy": "nothing"},
    {"kv_budgett": 0.5},
    {"kv_ceiling": 9},
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GUIDES: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": "[a-f]{3}-[0-9]{2}"},
)


@dataclass(frozen=True)
class Schedule:
    """Says what each request is, and which server it goes to.

    Attributes:
        seed: of everything.
        per_setup: requests until the next server has its turn.
        setups: that take turns.
    """

    seed: int
    per_setup: int
    setups: tuple[Setup, ...] = SETUPS

    def setup_of(self, index: int) -> Setup:
        """Returns the setup that serves a request."""
        return self.setups[index // self.per_setup % len(self.setups)]

    def end_of_turn(self, index: int) -> int:
        """Returns the first index of the turn after a request's."""
        return (index // self.per_setup + 1) * self.per_setup

    def ask(self, index: int) -> Ask:
        """Returns the request with this index."""
        setup, rng = self.setup_of(index), random.Random(f"{self.seed}/{index}")
        ask = tenant_ask(index, setup, rng) if setup.recalls else self._ask(index, setup, rng)
        if rng.random() < CUT_SHARE:
            ask.cut = rng.choice((0, 1, 1, 2, 3, 5, 8, 13))
            ask.alone = False
        return ask

    def _ask(self, index: int, setup: Setup, rng: random.Random) -> Ask:
        prompt, shared = self._prompt(setup, rng)
        room = setup.max_tokens - len(prompt)
        length = min(rng.expovariate(1 / setup.answer_tokens), LONGEST * setup.answer_tokens)
        if setup.storms and len(prompt) <= SHORT:
            length = rng.uniform(2 * SHORT, 5 * SHORT)
        ask = Ask(index, prompt, max_tokens=min(room, 1 + int(length)))
        ask.stream, ask.chat = rng.random() < 0.5, rng.random() < 0.15
        ask.xargs = self._xargs(setup, rng, len(prompt), shared)
        if rng.random() < 0.08:
            ask.guide, ask.max_tokens = rng.choice(GUIDES), min(room, 40)
        if rng.random() < 0.1:
            ask.stop = rng.sample("aeiou/%{ ", 2)
        if rng.random() < 0.15:
            ask.logprobs = rng.choice((0, 1, 5))
        if rng.random() < 0.03:
            ask.prompt_logprobs = 0
        if rng.random() < 0.15:
            ask.temperature, ask.n = 1.0, rng.choice((1, 2, 3))
        elif not setup.answers_depend_on_load:
            ask.alone = rng.random() < ALONE_SHARE / 0.7  # of those that may
        if rng.random() < REFUSED_SHARE:
            self._spoil(ask, setup, rng)
        return ask

    def _prompt(self, setup: Setup, rng: random.Random) -> tuple[list[int], int]:
        """Token ids, and how many of them are those of a document that others ask about, too."""
        most = setup.max_tokens - 2
        if setup.storms and rng.random() < SHORT_SHARE:
            return _tokens(rng, rng.randint(1, SHORT)), 0
        kind = rng.random()
        if kind < 0.4:
            which = rng.randrange(NUM_DOCUMENTS)
            document = random.Random(f"{self.seed}/{setup.name}/{which}")
            size = document.randint(40, most - 100)
            if setup.converses:  # a turn of a conversation whose next one is longer
                return _tokens(document, size)[: size * rng.randint(1, 4) // 4], 0
            return [*_tokens(document, size), *_tokens(rng, rng.randint(1, 60))], size
        if kind < 0.85:
            return _tokens(rng, rng.randint(1, 160)), 0
        if kind < 0.97:
            return _tokens(rng, rng.randint(160, most)), 0
        return _tokens(rng, rng.choice((1, 1, 31, 32, 33, 64, most - 1, most))), 0

    def _xargs(
        self, setup: Setup, rng: random.Random, num_tokens: int, shared: int
    ) -> dict[str, Any]:
        xargs: dict[str, Any] = {}
        if shared and rng.random() < 0.5:
            xargs["kv_context_tokens"] = shared
        elif rng.random() < 0.05:
            xargs["kv_context_tokens"] = rng.randint(1, 2 * num_tokens)
        if setup.chooses and rng.random() < 0.8:
            policies = (*setup.settings("")["request_policies"], setup.policy)
            xargs["kv_policy"] = rng.choice(policies)
        if setup.chooses and rng.random() < 0.3:
            xargs["kv_budget"] = rng.choice((0.1, 0.25, 0.5, 0.8))
        if setup.ceiling and rng.random() < 0.5:
            xargs["kv_ceiling"] = rng.randint(MIN_CEILING, setup.ceiling)
        if setup.protects and xargs.get("kv_policy") not in MERGING and rng.random() < 0.7:
            xargs["kv_protect"] = sorted(rng.sample(range(num_tokens + 40), 4))
        if setup.chooses_read and rng.random() < 0.5:
            xargs["kv_read"] = rng.choice((0.2, 0.3, 0.6, 1.0))
        return xargs

    def _spoil(self, ask: Ask, setup: Setup, rng: random.Random) -> None:
        """Changes a request into one that must be refused."""
        ask.refused, ask.alone = True, False
        if rng.random() < 0.3:
            ask.prompt = _tokens(rng, setup.max_tokens + rng.randint(1, 2000))
        else:
            ask.xargs = {**ask.xargs, **rng.choice(WRONG)}


def _tokens(rng: random.Random, number: int) -> list[int]:
    """Random printable characters, as tokens."""
    return [rng.choice(PRINTABLE) for _ in range(number)]
