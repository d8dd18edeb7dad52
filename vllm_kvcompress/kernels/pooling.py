"""Pooling of scores over neighbouring entries, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def max_within(scores: Tensor, num_after: int, num_before: int) -> Tensor:
    """[H, n] the highest of the [H, n] fp32 scores that reach each entry, cut at the ends:
    max of scores[:, i - num_after : i + num_before + 1] for entry i."""
    if scores.shape[1] == 0:
        return scores
    beyond = functional.pad(scores, (num_after, num_before), value=float("-inf"))
    return functional.max_pool1d(beyond[None], num_after + num_before + 1, 1)[0]


def max_or_mean_pool(scores: Tensor, kernel_size: int, mode: str) -> Tensor:
    """Pools scores over neighbouring entries, with stride 1 and the same length.

    Args:
        scores: [H, n] fp32.
        kernel_size: odd width; 1 changes nothing.
        mode: "max" (beyond the ends counts as minus infinity) or "mean" (as zero).
    """
    if kernel_size <= 1 or scores.shape[1] == 0:
        return scores
    padding = kernel_size // 2
    if mode == "max":
        return functional.max_pool1d(scores[None], kernel_size, 1, padding)[0]
    return functional.avg_pool1d(scores[None], kernel_size, 1, padding)[0]
