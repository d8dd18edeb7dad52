"""Random caches in pages, with NaN wherever a kernel has no business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvcompress.kernels.paged_entries import PagedEntries


def make_entries(
    lengths: Sequence[int],
    block_size: int = 16,
    head_size: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedEntries:
    """Sequences in scattered pages; rows behind a length are NaN, ids behind a last page wild."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    width = max([1, *counts]) + 1
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    pages = torch.full((num_pages, block_size, 2, head_size), torch.nan)
    page_table = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for nth in range(count):
            page = page_table[s, nth] = order.pop()
            used = min(block_size, length - nth * block_size)
            pages[page, :used] = torch.randn(used, 2, head_size, generator=generator)
    return PagedEntries(
        pages.flatten(1).to(dtype),
        page_table,
        torch.tensor(lengths, dtype=torch.int32),
        block_size,
        head_size,
    )


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
