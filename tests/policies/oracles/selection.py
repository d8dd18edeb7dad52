"""Which entries a head keeps, once it is known how many."""

from __future__ import annotations

import math
from typing import Any

from tests.policies.oracles.attention import value_norms
from tests.policies.oracles.heads import Head, Vector


def best(candidates: list[int], score: Vector, count: int) -> list[int]:
    """The `count` entries of highest score; of equal ones, the later."""
    return sorted(candidates, key=lambda j: (score[j], j), reverse=True)[:count]


def select(
    head: Head, score: Vector, kept: int, stay: set[int], critical: dict[str, Any] | None
) -> list[int]:
    candidates = [j for j in range(head.size) if j not in stay]
    budget = kept - len(stay)
    if critical is None:
        return sorted([*stay, *best(candidates, score, budget)])
    first = best(candidates, score, math.floor(critical["alpha"] * budget))
    weighted = weighted_scores(head, score, critical)
    others = [j for j in candidates if j not in first]
    second = best(others, weighted, budget - len(first))
    return sorted([*stay, *first, *second])


def weighted_scores(head: Head, score: Vector, critical: dict[str, Any]) -> Vector:
    """CriticalKV's second stage."""
    nu = value_norms(head, critical["norm"])
    return [(s + critical["epsilon"]) * v for s, v in zip(score, nu, strict=True)]
