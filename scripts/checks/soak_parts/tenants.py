"""Two tenants with secrets: the same keys in their contexts, and never the same values.

The reference model finds a key's value in its context, so that a page of another tenant's shows.
"""

from __future__ import annotations

import random

from soak_parts.asks import Ask
from soak_parts.setups import Setup
from training.tasks import FIRST_VALUES, KEYS, NOISE, SECOND_VALUES, STOP
from training.tokenizer import ANSWER, BOS, encode

NUM_TENANTS = 2
NUM_CONTEXTS = 8  # of each tenant, about which several of its requests ask
_SHARE = len(FIRST_VALUES) // NUM_TENANTS


def values_of(tenant: int) -> tuple[list[str], list[str]]:
    """The first and second words that a tenant's secrets are made of."""
    share = slice(tenant * _SHARE, (tenant + 1) * _SHARE)
    return list(FIRST_VALUES[share]), list(SECOND_VALUES[share])


def tenant_ask(index: int, setup: Setup, rng: random.Random) -> Ask:
    """A question of one of two tenants about a context, which may be an earlier request's, too."""
    tenant = rng.randrange(NUM_TENANTS)
    others = [word for words in values_of(1 - tenant) for word in words]
    is_known = rng.random() < 0.6
    name = rng.randrange(NUM_CONTEXTS) if is_known else f"only {index}"
    words, facts = _context(tenant, random.Random(f"{setup.name}/{tenant}/{name}"), setup)
    key, value = rng.choice(facts)
    context = [BOS, *encode(words)]
    prompt = [*context, *encode(["find", key]), ANSWER]
    ask = Ask(index, prompt, max_tokens=8, stream=rng.random() < 0.5)
    ask.cache_salt = f"tenant {tenant}" if rng.random() < 0.7 else None
    ask.secrets, ask.foreign = value, tuple(others)
    ask.alone = rng.random() < 0.02
    if rng.random() < 0.7:
        ask.xargs["kv_context_tokens"] = len(context)
    return ask


def _context(
    tenant: int, rng: random.Random, setup: Setup
) -> tuple[list[str], list[tuple[str, tuple[str, str]]]]:
    """Words with facts strewn among them. Both tenants' contexts begin alike."""
    first, second = values_of(tenant)
    facts = [(key, (rng.choice(first), rng.choice(second))) for key in rng.sample(KEYS, 6)]
    size = rng.randint(64, setup.max_tokens - 40)
    groups = [[key, *value, STOP] for key, value in facts]
    groups += [[rng.choice(NOISE)] for _ in range(size - 4 * len(groups) - 32)]
    rng.shuffle(groups)
    start = [NOISE[place % len(NOISE)] for place in range(32)]
    return start + [word for group in groups for word in group], facts
