"""A layer's pages divided among its heads, a program per request."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.apportion import MIN_SHARE, ROUNDING
from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.common.paged_entries import expect

LEAST_SHARE = tl.constexpr(MIN_SHARE)
NOISE = tl.constexpr(ROUNDING)


@triton.jit
def _ideal(weight, least, most, total):
    """[HEADS] fractions of pages: multiples of weights within bounds, `total` in sum.

    The sum grows with the multiple, linearly between the points where a head reaches a bound.
    """
    points = tl.ravel(tl.join(least / weight, most / weight))
    reached = points[:, None] * weight[None, :]
    sums = tl.sum(tl.minimum(tl.maximum(reached, least[None, :]), most[None, :]), 1)
    few, inf = sums < total, float("inf")
    below = tl.max(tl.where(few, points, -inf), 0)
    above = tl.min(tl.where(few, inf, points), 0)
    sum_below = tl.max(tl.where(few, sums, -inf), 0)
    sum_above = tl.min(tl.where(few, inf, sums), 0)
    between = below + (total - sum_below) / (sum_above - sum_below) * (above - below)
    multiple = tl.where(below == -inf, above, tl.where(above == inf, below, between))
    return tl.minimum(tl.maximum(multiple * weight, least), most)


@kernel("num_heads")
def _apportion_kernel(shares, floor, cap, pages, totals, num_heads, HEADS: tl.constexpr):
    """Writes pages [R, H] int64, by the largest remainders of the ideal division."""
    total = tl.load(totals + tl.program_id(0))
    head = tl.arange(0, HEADS)
    inside = head < num_heads
    head += tl.program_id(0) * num_heads
    least = tl.load(floor + head, mask=inside, other=0).to(tl.float64)
    most = tl.load(cap + head, mask=inside, other=0).to(tl.float64)
    share = tl.load(shares + head, mask=inside, other=0).to(tl.float64)
    share = tl.where(share > 0, share, 0.0)
    share_sum = tl.sum(share, 0)
    weight = share / tl.where(share_sum > 0, share_sum, 1.0) + LEAST_SHARE
    ideal = _ideal(weight, least, most, total.to(tl.float64))
    full = tl.floor(ideal + NOISE)
    # In units of arithmetic noise, so that equal remainders are equal.
    remainder = tl.floor((ideal - full) / NOISE + 0.5)
    remainder = tl.where(inside & (full < most), remainder, float("-inf"))
    own, other = remainder[:, None], remainder[None, :]
    ahead = (other > own) | ((other == own) & (head[None, :] < head[:, None]))
    place = tl.sum(ahead.to(tl.int32), 1)
    left = total - tl.sum(full, 0).to(tl.int64)
    given = full.to(tl.int64) + (place < left).to(tl.int64)
    tl.store(pages + head, given, mask=inside)


def apportion(shares: Tensor, total: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    """Triton launcher of `apportion`: same signature and result."""
    expect(
        shares.shape == floor.shape == cap.shape and shares.shape[:-1] == total.shape,
        "shares, floor and cap [requests, heads] and a total per request",
        f"{tuple(shares.shape)}, {tuple(floor.shape)}, {tuple(cap.shape)} and {tuple(total.shape)}",
        "pass those of one layer",
    )
    num_requests, num_heads = shares.shape
    pages = torch.empty(shares.shape, dtype=torch.int64, device=shares.device)
    if pages.numel() == 0:
        return pages
    with on_device(shares):
        _apportion_kernel[(num_requests,)](
            shares.contiguous(),
            floor.contiguous(),
            cap.contiguous(),
            pages,
            total.contiguous(),
            num_heads,
            HEADS=padded(num_heads),
            num_warps=1,
        )
    return pages
