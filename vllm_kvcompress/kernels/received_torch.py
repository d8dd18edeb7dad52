"""Kept entries with what evicted ones give to them (CaM, D2O), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def spread_values(values: Tensor, kept: Tensor, shares: Tensor, num_targets: int) -> Tensor:
    """[H, n, D] values; kept ones with the shares of those before that reach them (CaM).

    Args:
        values: [H, n, D], finite where anything is kept or shared.
        kept: [H, n] bool.
        shares: [H, n] part of a value that each of the next `num_targets` kept ones gets; 0 for
            kept entries and padding.
        num_targets: fewer where not so many follow.
    """
    number = kept.cumsum(dim=1)  # of kept entries so far: those that come next begin with it
    last = torch.minimum(number + num_targets, number[:, -1:])
    added = shares[..., None].double() * values.double()
    # What reaches a number: everything whose range has begun and not ended.
    wide = (-1, -1, added.shape[2])
    steps = added.new_zeros(added.shape[0], added.shape[1] + 1, added.shape[2])
    steps.scatter_add_(1, number[..., None].expand(*wide), added)
    steps.scatter_add_(1, last[..., None].expand(*wide), added.neg_())
    own = (number - 1).clamp_min(0)
    received = steps.cumsum(dim=1).gather(1, own[..., None].expand(*wide))
    return (values.double() + received * kept[..., None]).to(values.dtype)


def merge_into(rows: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """[H, n, D] means of each row, of weight 1, and of those that go to it, of theirs (D2O).

    Args:
        rows: [H, n, D], finite.
        targets: [H, n] int64 which row each one goes to.
        weights: [H, n] fp32, not negative; 0 for those that go nowhere.
    """
    wide = rows.float()
    total = 1 + torch.zeros_like(weights).scatter_add(1, targets, weights)
    index = targets[..., None].expand_as(wide)
    sums = wide.scatter_add(1, index, weights[..., None] * wide)
    return (sums / total[..., None]).to(rows.dtype)
