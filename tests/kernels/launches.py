"""Launches that tests ask for by name, because what they need cannot travel by pipe."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.compact_triton import compact_pages
from vllm_kvcompress.kernels.decode_triton import (
    DEFAULT_SETTINGS,
    decode_attention,
    launch_decode,
)
from vllm_kvcompress.kernels.paged_entries import PagedEntries


def signature_of(name: str) -> str:
    """Of the function of that dotted name."""
    return str(inspect.signature(pkgutil.resolve_name(name)))


def compacted(entries: PagedEntries, *args: Tensor) -> Tensor:
    """All pages after a compaction."""
    compact_pages(entries, *args)
    return entries.pages


def decode_scanning(entries: PagedEntries, queries: Tensor, scale: float, scan: int) -> Tensor:
    """Decode attention that reads `scan` lengths at once."""
    settings = replace(DEFAULT_SETTINGS, scan=scan)
    outputs, _ = launch_decode(entries, queries, scale, None, False, None, settings)
    return outputs


def decode_far_and_near(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same sequence in the first pages of a cache, and behind its first 2^31 elements.

    Most of the cache is never touched, so it takes addresses and no memory.
    """
    near = make_entries([40], dtype=dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_near, page = near.pages.shape
    first = 2**31 // page + 1
    cache = torch.empty(first + num_near, page, dtype=dtype, device=device)
    cache[first:] = near.pages.to(device)
    queries = random(1, 4, 64, dtype=dtype).to(device)
    lengths = near.lengths.to(device)
    tables = (near.page_table + first, near.page_table)
    pages = (cache, near.pages.to(device))
    outputs = [
        decode_attention(
            PagedEntries(where, table.to(device), lengths, 16, 64), queries, 0.1, None, False
        )[0].cpu()
        for where, table in zip(pages, tables, strict=True)
    ]
    return outputs[0], outputs[1]
