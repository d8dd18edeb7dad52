"""Whole pages in proportion to shares, within bounds, with exact totals.

Fractions are rounded to the largest remainders; ties go to the earlier head or layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST_SHARE = 1e-9  # of the sum: heads of no share take what nobody else can hold
ROUNDING = 1e-6  # pages; smaller differences are arithmetic noise


def apportion(shares: Tensor, total: int, floor: Tensor, cap: Tensor) -> Tensor:
    """Divides `total` pages in proportion to shares, within bounds, exactly.

    The ideal division is min(max(m * share, floor), cap) with the one m that gives the total:
    what a capped head cannot take goes to the others in proportion. It is rounded to the largest
    remainders. `spread` is the same in Python numbers.

    Args:
        shares: [H] non-negative; all zero means equal.
        total: pages to divide; between the sums of `floor` and `cap`.
        floor: [H] int64 least pages of each, at most `cap`.
        cap: [H] int64 most pages of each.

    Returns:
        [H] int64 with sum `total`.
    """
    weight = shares.double().clamp_min(0)
    weight = weight / weight.sum().clamp_min(1e-300) + SMALLEST_SHARE
    least, most = floor.double(), cap.double()
    # The sum grows with m, linearly between the points where a head reaches a bound.
    points = torch.cat([least / weight, most / weight]).sort().values
    sums = torch.clamp(points[:, None] * weight, least, most).sum(dim=1)
    above = (sums < total).sum().clamp_max(points.numel() - 1)[None]
    below = (above - 1).clamp_min(0)
    rise = (sums[above] - sums[below]).clamp_min(1e-300)
    part = ((total - sums[below]) / rise).clamp(0, 1)
    multiple = points[below] + part * (points[above] - points[below])
    return _to_whole(torch.clamp(multiple * weight, least, most), total, cap)


def _to_whole(ideal: Tensor, total: int, cap: Tensor) -> Tensor:
    """[H] int64 nearest to `ideal` with sum `total`: largest remainders, then lower heads."""
    whole = (ideal + ROUNDING).floor().to(torch.int64)
    remainder = ((ideal - whole) / ROUNDING).round().masked_fill(whole >= cap, float("-inf"))
    order = remainder.argsort(descending=True, stable=True)
    place = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    return whole + (place < total - whole.sum()).to(torch.int64)


def spread(
    shares: Sequence[float], total: int, capacity: Sequence[int], floor: Sequence[int] | None = None
) -> list[int]:
    """`total` pages divided among layers: `apportion` in Python numbers, known without a device.

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
