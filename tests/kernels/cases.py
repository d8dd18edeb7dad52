"""Random caches in pages, with NaN wherever a kernel has no business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers


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
        for index in range(count):
            page = page_table[s, index] = order.pop()
            used = min(block_size, length - index * block_size)
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


def some_bias(lengths: Sequence[int], page: int = 16, seed: int = 2) -> PagedNumbers:
    """Biases of sequences, which share rows in pairs where their number is even.

    Numbers lie in scattered pages, and begin anywhere in the first; what nobody has is NaN, and
    ids behind the last page are wild.
    """
    heads = 1 if len(lengths) % 2 else 2
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(len(lengths), dtype=torch.int32)
    table = torch.full((len(lengths) // heads, sum(lengths) // page + 3), 2**31 - 1)
    num_pages = table.numel()
    order = torch.randperm(num_pages, generator=generator).tolist()
    pages = torch.full((num_pages * page,), torch.nan)
    for row in range(len(table)):
        end = 3
        for s in range(row * heads, (row + 1) * heads):
            starts[s], end = end, end + lengths[s]
        held = [order.pop() for _ in range(-(-end // page))]
        table[row, : len(held)] = torch.tensor(held)
        for index in range(3, end):
            place = held[index // page] * page + index % page
            pages[place] = 3 * torch.randn(1, generator=generator)
    numbers = torch.tensor(lengths, dtype=torch.int32)
    return PagedNumbers(pages.view(num_pages, page), table.to(torch.int32), starts, numbers)
