"""Chooses the cheapest of the tried settings that is good enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvcompress.tools.evaluation.setups import FULL, TEXT, Setup


def rounds(setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """Yields all setups up to each budget, from the smallest on; always with the full cache.

    Fractions and tokens are not comparable: fractions come first.
    """
    budgets = {setup.budget for setup in setups if setup.budget is not None}
    ordered = sorted(budgets, key=lambda budget: (isinstance(budget, int), budget))
    for count in range(1, len(ordered) + 1):
        tried = ordered[:count]
        yield [setup for setup in setups if setup.policy == FULL or setup.budget in tried]


def cheapest(
    rows: Sequence[dict[str, Any]], max_loss: float, max_nats: float = math.inf
) -> str | None:
    """Returns the setup that keeps least of those that are good enough in every mode, or None.

    Of equally cheap setups the better one wins, then the earlier one.

    Args:
        rows: from `summarize`, the full cache among them.
        max_loss: share of the full cache's score that may be lost.
        max_nats: nats per token by which texts may be predicted worse.
    """
    full = [row["score"] for row in rows if row["setup"] == FULL and row["mode"] != TEXT]
    least = (1 - max_loss) * full[0] if full else 0.0

    def good(row: dict[str, Any]) -> bool:
        if row["mode"] == TEXT:
            return bool(row["loss"] <= max_nats)
        return bool(row["score"] >= least)

    def price(modes: list[dict[str, Any]]) -> tuple[float, float, float]:
        """What is kept; among equals the worst score, then the worst loss."""
        scores = [row["score"] for row in modes if row["mode"] != TEXT]
        losses = [row["loss"] for row in modes if row["mode"] == TEXT]
        kept = round(max(row["kept"] for row in modes), 3)
        return kept, -min(scores, default=0.0), max(losses, default=0.0)

    setups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["setup"] != FULL:
            setups.setdefault(row["setup"], []).append(row)
    good_enough = [name for name, modes in setups.items() if all(map(good, modes))]
    return min(good_enough, key=lambda name: price(setups[name]), default=None)
