"""Whole pages divided among heads by shares, in plain torch.

Off the CPU sizes that depend on data never leave the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SHARE = 1e-9  # of the sum: heads of no share take what nobody else can hold
ROUNDING = 1e-6  # pages; smaller differences are arithmetic noise


def apportion(shares: Tensor, total: int, floor: Tensor, cap: Tensor) -> Tensor:
    """Divides `total` pages in proportion to shares, within bounds, exactly.

    The ideal division is min(max(m * share, floor), cap) with the one m that gives the total:
    what a capped head cannot take goes to the others in proportion. It is rounded to the largest
    remainders, ties to the earlier head.

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
