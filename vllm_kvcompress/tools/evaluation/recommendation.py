"""Which of the settings that were tried is the cheapest one that is good enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvcompress.tools.evaluation.setups import FULL, Setup


def rounds(setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """All setups up to each budget, from the smallest budget on; the full cache in every round.

    Fractions and tokens are not comparable: fractions come first.
    """
    budgets = {setup.budget for setup in setups if setup.budget is not None}
    ordered = sorted(budgets, key=lambda budget: (isinstance(budget, int), budget))
    for place in range(len(ordered)):
        tried = ordered[: place + 1]
        yield [setup for setup in setups if setup.policy == FULL or setup.budget in tried]


def cheapest(rows: Sequence[dict[str, Any]], max_loss: float) -> str | None:
    """The setup that keeps least of those whose score is good enough in every mode.

    Args:
        rows: of `summarize`, with the full cache among them.
        max_loss: share of the full cache's score that may be lost.

    Returns:
        Its name; of equally cheap ones the better one, then the earlier; None if there is none.
    """
    least = (1 - max_loss) * next(row["score"] for row in rows if row["setup"] == FULL)
    setups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["setup"] != FULL:
            setups.setdefault(row["setup"], []).append(row)
    good = [
        (round(max(row["kept"] for row in modes), 3), -min(row["score"] for row in modes), name)
        for name, modes in setups.items()
        if all(row["score"] >= least for row in modes)
    ]
    return min(good, key=lambda found: found[:2])[2] if good else None
