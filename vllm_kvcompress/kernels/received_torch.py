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
    head, place = kept.nonzero(as_tuple=True)
    number = (kept.cumsum(dim=1) - 1)[head, place]
    # An entry gets from those behind the kept one `num_targets` numbers before it.
    before = (torch.arange(len(place), device=place.device) - num_targets).clamp_min(0)
    behind = torch.where(number >= num_targets, place[before], 0)
    sums = torch.zeros(
        (values.shape[0], values.shape[1] + 1, values.shape[2]),
        dtype=torch.float64,
        device=values.device,
    )
    torch.cumsum(shares[..., None].double() * values, dim=1, out=sums[:, 1:])
    own = values[head, place].double()
    mixed = values.clone()
    mixed[head, place] = (own + sums[head, place] - sums[head, behind]).to(values.dtype)
    return mixed


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
