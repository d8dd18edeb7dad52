"""The best entries of each head, in plain torch.

Off the CPU sizes that depend on data never leave the device.
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
    """The `num_kept[h]` best valid entries of each head; ties go to the later one, NaN is lowest.

    Args:
        scores: [H, n] fp32; plus infinity marks entries that are kept whatever comes.
        valid: [H, n] bool.
        num_kept: [H] int64, at most the number of valid entries.

    Returns:
        [H, n] bool.
    """
    lowest = torch.iinfo(torch.int64).min
    keys = torch.where(valid, sortable(scores), lowest)
    lowest_kept = _in_order(keys, (num_kept - 1).clamp_min(0))
    return (keys >= lowest_kept) & valid & (num_kept > 0)[:, None]


def ranks(scores: Tensor, valid: Tensor) -> Tensor:
    """How many entries of the head score lower; of equals, the later is higher.

    Args:
        scores: [H, n] fp32.
        valid: [H, n] bool.

    Returns:
        [H, n] fp32 whole numbers, those of valid entries below all others.
    """
    scores = scores.masked_fill(~valid, float("inf"))
    nth = torch.arange(scores.shape[1], dtype=torch.float32, device=scores.device)
    if scores.device.type != "cpu":
        order = scores.argsort(dim=1, stable=True)
    else:
        import numpy as np

        # As below; the lower half of a key is its place.
        order = torch.from_numpy(np.sort(sortable(scores).numpy(), axis=1)) & 0xFFFFFFFF
    return torch.empty_like(scores).scatter_(1, order, nth.expand_as(scores))


def _in_order(keys: Tensor, nth: Tensor) -> Tensor:
    """[H, 1] the highest key of each head (nth 0), or a later one ([H])."""
    if keys.device.type != "cpu":
        return keys.sort(dim=1, descending=True).values.gather(1, nth[:, None])
    import numpy as np  # not needed on GPUs

    # Takes a thirtieth of the time of torch's sort of few long rows.
    rows = zip(keys.numpy(), (keys.shape[1] - 1 - nth).tolist(), strict=True)
    return torch.tensor([np.partition(row, place)[place] for row, place in rows])[:, None]
