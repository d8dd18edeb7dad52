"""What `selection` returns as shapes alone, and the most memory it takes meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 2048  # entries that a program of `top_entries_triton` goes through
COUNTS_BYTES = 1024  # that it writes: one number for each value of a digit
NUM_DIGITS = 4  # of a score, for each of which a head has counts of all its programs


def top_entries(scores: Tensor, valid: Tensor, num_kept: Tensor) -> Tensor:
    """As `selection_torch.top_entries`."""
    num_heads, num_entries = scores.shape
    num_tiles = -(-num_entries // TILE)
    counts = torch.empty(
        num_heads, NUM_DIGITS + num_tiles, COUNTS_BYTES, dtype=torch.uint8, device=scores.device
    )
    kept = torch.empty_like(valid)
    del counts
    return kept


def apportion(shares: Tensor, total: int, floor: Tensor, cap: Tensor) -> Tensor:
    """As `selection_torch.apportion`."""
    return torch.empty_like(cap)
