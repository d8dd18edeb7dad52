"""Kept values with what evicted ones give to them (CaM), in plain torch."""

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
    num_heads, num_entries, dims = values.shape
    sums = torch.zeros(
        (num_heads, num_entries + 1, dims), dtype=torch.float64, device=values.device
    )
    torch.cumsum(shares[..., None].double() * values, dim=1, out=sums[:, 1:])
    # An entry gets from those behind the kept one that lies `num_targets` kept ones before it.
    number = kept.cumsum(dim=1) - 1
    nth = torch.arange(num_entries, device=values.device).expand_as(number)
    places = torch.zeros((num_heads, num_entries + 1), dtype=torch.int64, device=values.device)
    places.scatter_(1, torch.where(kept, number, num_entries), nth)
    behind = places.gather(1, (number - num_targets).clamp_min(0))
    behind = behind.masked_fill(number < num_targets, 0)[..., None].expand_as(values)
    received = (sums[:, :-1] - sums.gather(1, behind)).masked_fill_(~kept[..., None], 0)
    return (values + received).to(values.dtype)
