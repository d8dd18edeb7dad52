"""Which entries have the best scores, deterministically.

Ties go to the later position; NaN is lowest. Everything is vectorised and synchronisation-free:
sizes that depend on data never leave the device.
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
