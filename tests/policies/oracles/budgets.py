"""How many pages every head gets."""

from __future__ import annotations

import math
from typing import Any

from tests.policies.oracles.heads import Head, Vector
from tests.policies.oracles.protection import protected


def divide(shares: Vector, total: int, floors: list[int], caps: list[int]) -> list[int]:
    """min(max(m * share, floor), cap) with m found by bisection, then largest remainders."""
    all_shares = sum(shares)
    weights = [s / all_shares + 1e-9 if all_shares else 1.0 for s in shares]

    def ideal(multiple: float) -> Vector:
        return [
            min(max(multiple * w, lo), hi) for w, lo, hi in zip(weights, floors, caps, strict=True)
        ]

    low, high = 0.0, 1e15
    for _ in range(300):
        middle = (low + high) / 2
        if sum(ideal(middle)) < total:
            low = middle
        else:
            high = middle
    exact = ideal(high)
    pages = [math.floor(x + 1e-6) for x in exact]
    while sum(pages) < total:
        best = None
        for h in range(len(pages)):
            rest = round((exact[h] - pages[h]) * 1e6)
            if pages[h] < caps[h] and (best is None or rest > best[0]):
                best = (rest, h)
        assert best is not None
        pages[best[1]] += 1
        exact[best[1]] -= 1e9  # once each
    return pages


def ada_shares(
    heads: list[Head],
    scores: list[Vector],
    total_tokens: int,
    protection: tuple[int, int, float],
    params: dict[str, Any],
) -> Vector:
    count = len(heads)
    fixed = [protected(head, min(head.size, total_tokens // count), *protection) for head in heads]
    selectable = total_tokens - sum(map(len, fixed))
    mean = selectable / count
    if params.get("normalize") == "on":
        scores = [
            weighed_by_share(head, row, stay, math.floor(mean))
            for head, row, stay in zip(heads, scores, fixed, strict=True)
        ]
    ranked = [
        sorted(
            (j for j in range(head.size) if j not in fixed[h]),
            key=lambda j, h=h: (scores[h][j], j),
            reverse=True,
        )
        for h, head in enumerate(heads)
    ]
    phi, won = params["safeguard"], [0] * count
    if params["safeguard_mode"] == "floor":
        won = [min(math.floor(phi * mean), len(order)) for order in ranked]
    rest = [(scores[h][j], h, j) for h, order in enumerate(ranked) for j in order[won[h] :]]
    for _, h, _ in sorted(rest, reverse=True)[: selectable - sum(won)]:
        won[h] += 1
    if params["safeguard_mode"] == "blend":
        return [(1 - phi) * w + phi * mean + len(f) for w, f in zip(won, fixed, strict=True)]
    return [float(w + len(f)) for w, f in zip(won, fixed, strict=True)]


def weighed_by_share(head: Head, row: Vector, stay: set[int], count: int) -> Vector:
    """A head's scores times the share of its best competing ones in their sum."""
    open_scores = sorted((row[j] for j in range(head.size) if j not in stay), reverse=True)
    share = sum(open_scores[:count]) / sum(open_scores) if any(open_scores) else 0.0
    return [share * score for score in row]


def duo_pages(gates: Vector, few: int, caps: list[int], total: int) -> list[int]:
    """A few pages for every head, then everything by gate."""
    few = min(few, total // len(caps))
    pages = [min(few, cap) for cap in caps]
    order = sorted(range(len(caps)), key=lambda h: (-gates[h], h))
    for h in order:
        while pages[h] < caps[h] and sum(pages) < total:
            pages[h] += 1
    return pages


def headkv_shares(
    table: list[Vector], layer: int, total: int, beta: float, window_pages: float
) -> Vector:
    """b = window + s * pool + c - c / beta, c such that the layer's heads sum to its total."""
    num_heads, num_all = len(table[layer]), len(table) * len(table[layer])
    window_pages = min(window_pages, total / num_heads)

    def shares(c: float) -> Vector:
        pool = c / beta * num_all
        return [window_pages + score * pool + c - c / beta for score in table[layer]]

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    return shares(high)
