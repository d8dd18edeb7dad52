"""Llama-3.1-8B's shape, and caches of it with random contents in scattered pages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.attention import sum_tiles
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, tile_size
from vllm_kvcompress.rounding import ceil_div

NUM_LAYERS = 32
NUM_HEADS = 8
GROUP = 4
HEAD_SIZE = 128
HIDDEN_SIZE = 4096
INTERMEDIATE_SIZE = 14336
DTYPE = torch.bfloat16
SCALE = HEAD_SIZE**-0.5
KEPT = 0.25  # of a prompt, by events that are measured


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def entry_bytes(num_tokens: int) -> int:
    """Bytes of the keys and values of so many tokens of one head."""
    return num_tokens * 2 * HEAD_SIZE * DTYPE.itemsize


def uniform_lengths(num_requests: int, num_tokens: int) -> Tensor:
    """[num_requests * NUM_HEADS] the same for every head."""
    return torch.full((num_requests * NUM_HEADS,), num_tokens)


def ragged_lengths(
    num_requests: int, num_tokens: int, longest: int, block_size: int, seed: int = 0
) -> Tensor:
    """[num_requests * NUM_HEADS] whole pages, as AdaKV would divide them.

    Each request has as many pages as with `num_tokens` for every head; shares are log-normal, so
    that a few heads have several times the mean, and none has more than `longest` tokens.
    """
    generator = _generator(seed)
    total = num_tokens // block_size * NUM_HEADS
    most = longest // block_size
    lengths = []
    for _ in range(num_requests):
        shares = torch.randn(NUM_HEADS, generator=generator).exp()
        pages = (shares / shares.sum() * total).long().clamp(1, most)
        while (missing := total - int(pages.sum())) != 0:
            step = 1 if missing > 0 else -1
            able = (pages < most) if missing > 0 else (pages > 1)
            places = able.nonzero()[: abs(missing), 0]
            pages[places] += step
        lengths.append(pages * block_size)
    return torch.cat(lengths)


def lengths_of(
    layout: str, num_requests: int, num_tokens: int, longest: int, block_size: int
) -> Tensor:
    """[num_requests * NUM_HEADS] tokens, `uniform` or `ragged`."""
    if layout == "uniform":
        return uniform_lengths(num_requests, num_tokens)
    return ragged_lengths(num_requests, num_tokens, longest, block_size)


def make_entries(lengths: Tensor, block_size: int, spare_pages: int = 0) -> PagedEntries:
    """A cache on the GPU; `spare_pages` at its end belong to nobody."""
    counts = ceil_div(lengths, block_size)
    total, width = int(counts.sum()), int(counts.max())
    pages = torch.randn(total + spare_pages, 2 * block_size * HEAD_SIZE, dtype=DTYPE, device="cuda")
    held = torch.arange(width) < counts[:, None]
    page_table = torch.zeros(len(lengths), width, dtype=torch.int32)
    page_table[held] = torch.randperm(total, generator=_generator(1)).int()
    return PagedEntries(pages, page_table.cuda(), lengths.int().cuda(), block_size, HEAD_SIZE)


def tile_ends_of(entries: PagedEntries) -> Tensor:
    """Counts tiles of decode attention, once for all layers."""
    tile_ends = torch.empty_like(entries.flat_lengths)
    sum_tiles(entries.flat_lengths[None], tile_ends[None], tile_size(entries))
    return tile_ends


def make_whole_entries(num_requests: int, num_tokens: int, block_size: int) -> PagedEntries:
    """A cache on the GPU as whole requests have it: every block is `NUM_HEADS` successive pages."""
    entries = make_entries(uniform_lengths(num_requests, num_tokens), block_size)
    return blockwise(entries, NUM_HEADS)


def blockwise(entries: PagedEntries, num_heads: int) -> PagedEntries:
    """The same pages, owned by blocks of `num_heads` successive ones, in a random order."""
    requests = entries.num_sequences // num_heads
    blocks = torch.randperm(len(entries.pages) // num_heads, generator=_generator(1))
    pages = blocks.view(requests, 1, -1) * num_heads + torch.arange(num_heads)[:, None]
    page_table = pages.flatten(0, 1).int().to(entries.device)
    return replace(entries, page_table=page_table)
