"""Kept entries averaged with those that go to them (D2O), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
