"""Launches that tests ask for by name, because what they need cannot travel by pipe."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from gpu_parts.vllm_attention import vllm_attention
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels import top_entries_triton
from vllm_kvcompress.kernels.attention import decode_triton
from vllm_kvcompress.kernels.attention.decode_triton import decode_attention, sum_tiles
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.launch_triton import MIN_DOT_ROWS
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, tile_size
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.compaction_triton import compact_pages


def top_entries_in_small_tiles(
    scores: Tensor, valid: Tensor, num_kept: Tensor, tile: int, scan: int
) -> Tensor:
    """`top_entries` with programs of `tile` entries that read the counts of `scan` tiles."""
    with mock.patch.multiple(top_entries_triton, TILE=tile, SCAN=scan):
        return top_entries_triton.top_entries(scores, valid, num_kept)


def signature_of(name: str) -> str:
    """Signature of the function of that dotted name."""
    return str(inspect.signature(pkgutil.resolve_name(name)))


def compacted(entries: PagedEntries, *args: Tensor) -> Tensor:
    """All pages after a compaction."""
    compact_pages(entries, *args)
    return entries.pages


def corrected(module: str, state: PagedNumbers, outputs: Tensor, *args: object) -> Tensor:
    """Outputs after a correction."""
    kernels = importlib.import_module(f"vllm_kvcompress.kernels.{module}")
    kernels.correct_with_moments(state, outputs, *args)
    return outputs


def decode_searching(entries: PagedEntries, queries: Tensor, scale: float, search: int) -> Tensor:
    """Decode attention whose programs compare `search` sequences at once."""
    settings = replace(decode_triton.SETTINGS, search=search)
    with mock.patch.object(decode_triton, "SETTINGS", settings):
        return decode_attention(entries, queries, scale, None, False)[0]


def decode_counting(
    entries: PagedEntries, queries: Tensor, scale: float
) -> tuple[Tensor, Tensor, dict[int, int]]:
    """Outputs of decode attention, the tile ends that it was given, and by the number of a kernel's
    programs how many lengths and ends one of them reads at most."""
    lengths, counts = entries.lengths, Counter[tuple[int, tuple[int, ...]]]()
    tile_ends = torch.empty_like(lengths)
    sum_tiles(lengths[None], tile_ends[None], tile_size(entries))
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        for tensor in (lengths, tile_ends):
            first = tensor.data_ptr()
            inside = (pointers.data >= first) & (pointers.data < first + tensor.nbytes)
            programs = math.prod(self.grid_dim)
            counts[programs, self.grid_idx] += int((inside & mask.data).sum())
        return load(self, pointers, mask, *others)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counting):
        outputs, _ = decode_attention(entries, queries, scale, None, False, None, tile_ends)
    most: dict[int, int] = {}
    for (programs, _), count in counts.items():
        most[programs] = max(most.get(programs, 0), count)
    return outputs, tile_ends, most


def tiles_summed(module: str, lengths: Tensor, device: str) -> Tensor:
    """What the `sum_tiles` of a module makes of all but the first and last columns of lengths."""
    lengths = lengths.to(device)
    tile_ends = torch.full_like(lengths, -1)
    kernels = importlib.import_module(f"vllm_kvcompress.kernels.{module}")
    operator = kernels.sum_tiles
    operator = getattr(operator, "__wrapped__", operator)  # the twin beside a launcher
    operator(lengths[:, 1:-1], tile_ends[:, 1:-1], 64)
    return tile_ends.cpu()


def decode_far_and_near(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """The same sequence in the first pages of a cache, and behind its first 2^31 elements.

    Most of the cache is never touched, so on the CPU it takes addresses and no memory.
    """
    near = make_entries([40], dtype=dtype)
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


def vllm_outputs(entries: PagedEntries, queries: Tensor, scale: float) -> Tensor:
    """[S, m, G, D] attention by vLLM's kernel."""
    return vllm_attention(entries, queries, scale)()


def from_longer_rows(name: str, holder: PagedEntries | PagedKV, *args: object) -> object:
    """What the launcher of that dotted name returns for rows of a page table that persists."""
    entries = holder.entries if isinstance(holder, PagedKV) else holder
    num_sequences, width = entries.page_table.shape
    persistent = entries.page_table.new_full((num_sequences + 2, width + 7), 2**31 - 1)
    persistent[1:-1, :width] = entries.page_table
    rows = persistent[1:-1, :width]
    longer: PagedEntries | PagedKV = replace(entries, page_table=rows)
    if isinstance(holder, PagedKV):
        longer = replace(holder, entries=longer)
    return pkgutil.resolve_name(name)(longer, *args)


def with_fewest_rows(name: str, *args: object) -> tuple[object, int]:
    """What the launcher of that dotted name returns with the smallest programs, or its arguments
    if nothing; and of how many of its kernels these were."""
    module = importlib.import_module(name.rpartition(".")[0])
    asked: list[int] = []

    def launch_fewest(_: str, rows: int, __: Tensor, launch: Callable[[int], object]) -> None:
        asked.append(rows)
        launch(MIN_DOT_ROWS)

    with mock.patch.object(module, "launch_fitting", launch_fewest):
        result = pkgutil.resolve_name(name)(*args)
    assert min(asked) > MIN_DOT_ROWS
    return args if result is None else result, len(asked)
