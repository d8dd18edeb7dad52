"""The best entries of each head, in plain torch.

On a GPU no size depends on data, so nothing waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.kernels.dispatch import by_device


def sortable(scores: Tensor) -> Tensor:
    """int64 keys in the order of fp32 scores [..., n], ties broken by position; NaN is lowest."""
    clean = torch.where(torch.isnan(scores), float("-inf"), scores.float()).add_(0.0)
    bits = clean.contiguous().view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # of negative numbers all but the sign
    position = torch.arange(scores.shape[-1], device=scores.device)
    return torch.add(position, bits, alpha=1 << 32)


@by_device("top_entries_triton")
def top_entries(scores: Tensor, valid: Tensor, num_kept: Tensor) -> Tensor:
    """The `num_kept[h]` best valid entries of each head; ties go to the later one, NaN is lowest.

    Args:
        scores: [H, n] fp32; plus infinity marks entries that are always kept.
        valid: [H, n] bool.
        num_kept: [H] int64, at most the number of valid entries.

    Returns:
        [H, n] bool.
    """
    lowest = torch.iinfo(torch.int64).min
    keys = torch.where(valid, sortable(scores), lowest)
    if keys.device.type == "cpu":
        return keys >= _lowest_kept(keys, num_kept)
    ordered = keys.sort(dim=1, descending=True).values
    lowest_kept = ordered.gather(1, (num_kept - 1).clamp_min(0)[:, None])
    return (keys >= lowest_kept) & valid & (num_kept > 0)[:, None]


def ranks(scores: Tensor, valid: Tensor) -> Tensor:
    """Rank of each entry in its head: the number of entries that score lower, or equal and earlier.

    Args:
        scores: [H, n] fp32.
        valid: [H, n] bool.

    Returns:
        [H, n] fp32 integers, those of valid entries below all others.
    """
    scores = scores.masked_fill(~valid, float("inf"))
    places = torch.arange(scores.shape[1], dtype=torch.float32, device=scores.device)
    if scores.device.type != "cpu":
        order = scores.argsort(dim=1, stable=True)
    else:
        # Faster than torch's sort; the lower half of a key is its place.
        order = torch.from_numpy(np.sort(sortable(scores).numpy(), axis=1)) & 0xFFFFFFFF
    return torch.empty_like(scores).scatter_(1, order, places.expand_as(scores))


def _lowest_kept(keys: Tensor, num_kept: Tensor) -> Tensor:
    """[H, 1] the lowest key that each head keeps; above all others where it keeps none."""
    # A thirtieth of the time of torch's sort of few long rows.
    first = keys.shape[1] - num_kept.numpy()
    above = np.iinfo(np.int64).max
    lowest = [
        np.partition(row, place)[place] if place < len(row) else above
        for row, place in zip(keys.numpy(), first, strict=True)
    ]
    return torch.from_numpy(np.array(lowest, dtype=np.int64))[:, None]
