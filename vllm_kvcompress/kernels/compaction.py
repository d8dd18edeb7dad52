"""Kept entries copied to fresh pages, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.dispatch import by_device


@by_device("compaction_triton")
def compact_pages(
    entries: PagedEntries, page_counts: Tensor, kept_indices: Tensor, targets: Tensor
) -> None:
    """Copies the kept entries of every head to fresh pages, head after head.

    Args:
        entries: sources; their pages must not be among `targets`.
        page_counts: [S] int64 pages that each head keeps.
        kept_indices: [P * block_size] int64 kept entries of each head, P = sum(page_counts).
        targets: [P] int64 page ids; every row of these pages is written.
    """
    size = entries.block_size
    heads = torch.repeat_interleave(page_counts, output_size=targets.numel())
    heads = heads.repeat_interleave(size)
    page_ids = entries.page_table[heads, kept_indices // size].to(torch.int64)
    rows = entries.pages.unflatten(1, (size, -1))[page_ids, kept_indices % size]
    entries.pages[targets] = rows.view(targets.numel(), -1)
