"""Whole pages of layers in proportion to shares, within bounds, with exact totals.

Fractions are rounded to the largest remainders; ties go to the earlier layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_kvcompress.kernels.selection_torch import ROUNDING, SMALLEST_SHARE


def spread(
    shares: Sequence[float], total: int, capacity: Sequence[int], floor: Sequence[int] | None = None
) -> list[int]:
    """`total` pages divided among layers: as `kernels.selection.apportion`, in Python numbers.

    Args:
        shares: non-negative, by layer; all zero means equal.
        total: at most the sum of `capacity`.
        capacity: most pages of each layer.
        floor: least pages of each layer; ignored where they do not fit.
    """
    least = list(floor) if floor is not None else [0] * len(capacity)
    least = [min(low, high) for low, high in zip(least, capacity, strict=True)]
    if sum(least) > total:
        least = [0] * len(capacity)
    whole = sum(shares) or 1.0
    weights = [share / whole + SMALLEST_SHARE for share in shares]
    bounds = list(zip(weights, least, capacity, strict=True))

    def ideal(multiple: float) -> list[float]:
        return [min(max(multiple * weight, low), high) for weight, low, high in bounds]

    points = sorted(bound / weight for weight, *both in bounds for bound in both)
    sums = [sum(ideal(point)) for point in points]
    above = next((i for i, value in enumerate(sums) if value >= total), len(points) - 1)
    below = max(0, above - 1)
    rise = sums[above] - sums[below]
    part = min(1.0, max(0.0, (total - sums[below]) / rise)) if rise > 0 else 0.0
    exact = ideal(points[below] + part * (points[above] - points[below]))
    pages = [math.floor(value + ROUNDING) for value in exact]
    open_layers = [i for i, most in enumerate(capacity) if pages[i] < most]
    open_layers.sort(key=lambda i: (-round((exact[i] - pages[i]) / ROUNDING), i))
    for i in open_layers[: total - sum(pages)]:
        pages[i] += 1
    return pages
