"""Deterministic choices by score: which entries, and how many pages.

Ties go to the later position among entries and to the earlier head among pages. Everything is
vectorised and synchronisation-free: sizes that depend on data never leave the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sortable(scores: Tensor) -> Tensor:
    """int64 keys in the order of fp32 scores [..., n], ties broken by position; NaN is lowest."""
    clean = torch.where(torch.isnan(scores), float("-inf"), scores.float()) + 0.0
    bits = clean.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    position = torch.arange(scores.shape[-1], device=scores.device)
    return ordered * (1 << 32) + position


def top_entries(scores: Tensor, valid: Tensor, num_kept: Tensor) -> Tensor:
    """The `num_kept[h]` best valid entries of each head.

    Args:
        scores: [H, n] fp32; plus infinity marks entries that are kept whatever comes.
        valid: [H, n] bool.
        num_kept: [H] int64, at most the number of valid entries.

    Returns:
        [H, n] bool.
    """
    lowest = torch.iinfo(torch.int64).min
    keys = torch.where(valid, sortable(scores), lowest)
    ranked = keys.sort(dim=1, descending=True).values
    last = (num_kept - 1).clamp_min(0)[:, None]
    threshold = ranked.gather(1, last)
    return (keys >= threshold) & valid & (num_kept > 0)[:, None]


def apportion(shares: Tensor, total: int, floor: Tensor, cap: Tensor, largest_cap: int) -> Tensor:
    """Divides `total` pages in proportion to shares, within bounds, exactly.

    Webster's method: the pages go one by one to the claim share / (pages so far + 1/2), so a
    total is exact by construction, what a capped head cannot take goes to the others in
    proportion, and for shares that are whole numbers the result is the shares.

    Args:
        shares: [H] non-negative.
        total: pages to divide; at most the sum of `cap`.
        floor: [H] pages that each gets first; their sum should not exceed `total`.
        cap: [H] most pages that each can hold.
        largest_cap: a host-side bound of `cap`.

    Returns:
        [H] int64 with sum `total`.
    """
    widest = max(1, min(total, largest_cap))
    nth = torch.arange(widest, device=shares.device)
    base = shares.double().clamp_min(0) + 1e-9
    claims = base[:, None] / (nth + 0.5)
    claims = torch.where(nth < floor[:, None], 1e30 / (nth + 1.0), claims)
    claims = torch.where(nth < cap[:, None], claims, -1.0)
    order = claims.flatten().argsort(descending=True, stable=True)[:total]
    owners = torch.div(order, widest, rounding_mode="floor")
    return torch.zeros_like(cap, dtype=torch.int64).scatter_add_(0, owners, torch.ones_like(owners))
