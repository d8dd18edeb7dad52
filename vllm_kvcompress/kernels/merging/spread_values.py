"""Kept values with what evicted ones give to them (CaM), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView


def spread_values(
    view: KVView, kept: Tensor, shares: Tensor, num_targets: int, most: float
) -> Tensor:
    """[H, n, D] values; kept ones with the shares of those before that reach them (CaM).

    Args:
        view: of a layer.
        kept: [H, n] bool.
        shares: [H, n] part of a value that each of the next `num_targets` kept ones gets; 0 for
            kept entries, and behind the lengths.
        num_targets: fewer where not so many follow.
        most: shares that a kept one takes at most, in sum; where more reach it, all shrink alike.
    """
    return torch.cat(
        [
            _spread(view.clean(1, heads), kept[heads], shares[heads], num_targets, most)
            for heads in view.head_slices()
        ]
    )


def _spread(values: Tensor, kept: Tensor, shares: Tensor, num_targets: int, most: float) -> Tensor:
    num_heads, num_entries, dims = values.shape
    # The shares themselves as one more column.
    sums = _running_sums(shares[..., None].double() * functional.pad(values, (0, 1), value=1))
    # An entry gets from those behind the kept one that lies `num_targets` kept ones before it.
    number = kept.cumsum(dim=1) - 1
    nth = torch.arange(num_entries, device=values.device).expand_as(number)
    places = torch.zeros((num_heads, num_entries + 1), dtype=torch.int64, device=values.device)
    places.scatter_(1, torch.where(kept, number, num_entries), nth)
    behind = places.gather(1, (number - num_targets).clamp_min(0))
    behind = behind.masked_fill(number < num_targets, 0)[..., None].expand(-1, -1, dims + 1)
    received = (sums[:, :-1] - sums.gather(1, behind)).masked_fill_(~kept[..., None], 0)
    received, weight = received.split([dims, 1], dim=2)
    received = received * (most / weight.clamp_min(1e-30)).clamp_max(1)
    return (values + received).to(values.dtype)


def _running_sums(rows: Tensor) -> Tensor:
    """[H, n, D] -> [H, n + 1, D]: at place i the sum of the first i rows."""
    num_heads, num_entries, dims = rows.shape
    sums = rows.new_zeros((num_heads, num_entries + 1, dims))
    if rows.device.type == "cpu":
        torch.cumsum(rows, dim=1, out=sums[:, 1:])
    else:
        # GPUs add up along the last dimension in parallel, along others one by one.
        sums[:, 1:] = rows.mT.cumsum(dim=2).mT
    return sums
