"""Pages divided among heads in proportion to shares, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.dispatch import by_device

MIN_SHARE = 1e-9  # of the sum: heads without a share take what no other head can hold
RADIX = 16  # points whose sums are computed at once; every head has two points
ROUNDING = 1e-6  # pages; smaller differences are arithmetic noise


@by_device("apportion_triton")
def apportion(shares: Tensor, total: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    """Divides every request's pages in proportion to shares, within bounds, exactly.

    The ideal division is min(max(m * share, floor), cap) with the one m that gives the total:
    what a capped head cannot take goes to the others in proportion. It is rounded to the largest
    remainders, ties to the earlier head.

    Args:
        shares: [R, H] non-negative; all zero means equal.
        total: [R] int64 pages to divide; between the sums of `floor` and `cap`.
        floor: [R, H] int64 least pages of each, at most `cap`.
        cap: [R, H] int64 most pages of each.

    Returns:
        [R, H] int64, each row with its total as the sum.
    """
    weight = shares.double().clamp_min(0)
    weight = weight / weight.sum(dim=1, keepdim=True).clamp_min(1e-300) + MIN_SHARE
    least, most = floor.double(), cap.double()
    # The sum grows with m, linearly between the points where a head reaches a bound.
    points = torch.cat([least / weight, most / weight], dim=1).sort(dim=1).values
    total, num_points = total[:, None], points.shape[1]

    def sums_at(points: Tensor) -> Tensor:
        reached = points[:, :, None] * weight[:, None]
        return torch.clamp(reached, least[:, None], most[:, None]).sum(dim=2)

    # Counts the points whose sum is below the total, which come first: sixteen strides at a time.
    above, strides = torch.zeros_like(total), [1]
    while strides[0] * RADIX < num_points:
        strides.insert(0, strides[0] * RADIX)
    for stride in strides:
        at = above + stride * torch.arange(1, RADIX + 1, device=total.device) - 1
        sums = sums_at(points.gather(1, at.clamp_max(num_points - 1)))
        above = above + stride * (sums < total).sum(dim=1, keepdim=True)
    above = above.clamp_max(num_points - 1)
    points = points.gather(1, torch.cat([(above - 1).clamp_min(0), above], dim=1))
    sums = sums_at(points)
    part = ((total - sums[:, :1]) / sums.diff(dim=1).clamp_min(1e-300)).clamp(0, 1)
    multiple = points[:, :1] + part * points.diff(dim=1)
    return _rounded(torch.clamp(multiple * weight, least, most), total, cap)


def _rounded(ideal: Tensor, total: Tensor, cap: Tensor) -> Tensor:
    """[R, H] int64 nearest to `ideal` with sums [R, 1]: largest remainders, then lower heads."""
    pages = (ideal + ROUNDING).floor().to(torch.int64)
    remainder = ((ideal - pages) / ROUNDING).round().masked_fill(pages >= cap, float("-inf"))
    order = remainder.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, ranks)
    return pages + (rank < total - pages.sum(dim=1, keepdim=True)).to(torch.int64)
