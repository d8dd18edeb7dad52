"""Kept entries averaged with those that go to them (D2O), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView


def merge_into(view: KVView, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Means of each entry, of weight 1, and of those that go to it, of theirs (D2O).

    Off the CPU the order of additions, and with it the last bits, may differ from run to run.

    Args:
        view: of a layer.
        targets: [H, n] int64 which entry each one goes to.
        weights: [H, n] fp32, not negative; 0 for entries that go nowhere, and behind the lengths.

    Returns:
        [H, n, D] keys and values in the cache's type.
    """
    merged = torch.empty_like(view.keys()), torch.empty_like(view.values())
    for heads in view.head_slices():
        for which, rows in enumerate(merged):
            rows[heads] = _means(view.clean(which, heads), targets[heads], weights[heads])
    return merged


def _means(rows: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    wide = rows.float()
    total = 1 + torch.zeros_like(weights).scatter_add(1, targets, weights)
    index = targets[..., None].expand_as(wide)
    sums = wide.scatter_add(1, index, weights[..., None] * wide)
    return (sums / total[..., None]).to(rows.dtype)
