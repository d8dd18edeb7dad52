"""Which of the settings that were tried is the cheapest one that is good enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvcompress.tools.evaluation.setups import FULL, TEXT, Setup


def rounds(setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """All setups up to each budget, from the smallest budget on; the full cache in every round.

    Fractions and tokens are not comparable: fractions come first.
    """
    budgets = {setup.budget for setup in setups if setup.budget is not None}
    ordered = sorted(budgets, key=lambda budget: (isinstance(budget, int), budget))
    for place in range(len(ordered)):
        tried = ordered[: place + 1]
        yield [setup for setup in setups if setup.policy == FULL or setup.budget in tried]


def cheapest(
    rows: Sequence[dict[str, Any]], max_loss: float, max_nats: float = math.inf
) -> str | None:
    """The setup that keeps least of those that are good enough in every mode.

    Args:
        rows: of `summarize`, with the full cache among them.
        max_loss: share of the full cache's score that may be lost.
        max_nats: per token, by how much texts may be predicted worse.

    Returns:
        Its name; of equally cheap ones the better one, then the earlier; None if there is none.
    """
    full = [row["score"] for row in rows if row["setup"] == FULL and row["mode"] != TEXT]
    least = (1 - max_loss) * full[0] if full else 0.0

    def good(row: dict[str, Any]) -> bool:
        if row["mode"] == TEXT:
            return bool(row["loss"] <= max_nats)
        return bool(row["score"] >= least)

    def price(modes: list[dict[str, Any]]) -> tuple[float, float, float]:
        """What is kept; then, of equals, the worst score and the worst loss."""
        scores = [row["score"] for row in modes if row["mode"] != TEXT]
        losses = [row["loss"] for row in modes if row["mode"] == TEXT]
        kept = round(max(row["kept"] for row in modes), 3)
        return kept, -min(scores, default=0.0), max(losses, default=0.0)

    setups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["setup"] != FULL:
            setups.setdefault(row["setup"], []).append(row)
    found = [(*price(modes), name) for name, modes in setups.items() if all(map(good, modes))]
    return min(found, key=lambda each: each[:3])[3] if found else None
