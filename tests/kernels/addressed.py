"""Requests whose page ids lie anywhere: some by block, as vLLM has them, some by head."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import random
from vllm_kvcompress.kernels.attention import sum_tiles
from vllm_kvcompress.kernels.common.paged_entries import (
    AddressedEntries,
    PagedEntries,
    QueryTargets,
    tile_size,
)
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers, PagedNumbers

LAYERS, HEADS, LAYER, PER_BLOCK, OFFSETS = 3, 2, 1, 9, [1, 4, 6]
SIZE, DIM, GROUP, NUM_BLOCKS = 16, 64, 2, 14
WILD = 2**31 - 1
# Resident tokens of each head, and whether they lie in blocks of all heads.
REQUESTS = [((45, 45), True), ((33, 0), False), ((0, 0), True), ((1, 70), False), ((17, 17), True)]


def make_entries(dtype: torch.dtype) -> PagedEntries:
    """One layer's sequences; what nobody holds is NaN."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    own = [block * PER_BLOCK + index for block in blocks[:4] for index in range(PER_BLOCK)]
    blocks = blocks[4:]
    pages = torch.full((NUM_BLOCKS * PER_BLOCK, SIZE, 2, DIM), torch.nan)
    rows: list[list[int]] = []
    for lengths, by_block in REQUESTS:
        counts = [-(-length // SIZE) for length in lengths]
        block_ids = [blocks.pop() for _ in range(counts[0])] if by_block else []
        for head, length in enumerate(lengths):
            row = [block * PER_BLOCK + OFFSETS[LAYER] + head for block in block_ids]
            row = row or [own.pop(5) for _ in range(counts[head])]
            rows.append(row)
            for index, page in enumerate(row):
                used = min(SIZE, length - index * SIZE)
                pages[page, :used] = torch.randn(used, 2, DIM, generator=generator)
    table = torch.full((len(rows), 6), WILD, dtype=torch.int32)
    for sequence, row in enumerate(rows):
        table[sequence, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([length for each, _ in REQUESTS for length in each], dtype=torch.int32)
    return PagedEntries(pages.flatten(1).to(dtype), table, lengths, SIZE, DIM)


def make_rows(entries: PagedEntries, device: str) -> tuple[AddressedEntries, list[Tensor]]:
    """The same by addresses, and what lies there: of other layers and heads, wild ids."""
    kept, addresses = [], []
    for request, (_, by_block) in enumerate(REQUESTS):
        rows = entries.page_table[request * HEADS : (request + 1) * HEADS]
        if by_block:
            ids = torch.where(rows[0] == WILD, WILD, rows[0] // PER_BLOCK).to(torch.int32)
            ids, layers, heads, per_block = ids.to(device), 0, 0, PER_BLOCK
        else:
            table = torch.full((LAYERS, HEADS, 11), WILD, dtype=torch.int32)
            table[LAYER, :, :6] = rows
            ids, layers, heads, per_block = table.to(device), table.stride(0), table.stride(1), 0
        kept.append(ids)
        addresses.append([ids.data_ptr(), layers, heads, per_block])
    lengths = entries.lengths.to(device)
    tile_ends = torch.empty_like(lengths)
    sum_tiles(lengths[None], tile_ends[None], tile_size(entries))
    addressed = AddressedEntries(
        entries.pages.to(device),
        torch.tensor(addresses).to(device),
        lengths,
        tile_ends,
        torch.tensor(OFFSETS).to(device),
        LAYER,
        HEADS,
        SIZE,
        DIM,
    )
    return addressed, kept


def by_address(numbers: PagedNumbers) -> tuple[AddressedNumbers, list[Tensor]]:
    """The same by addresses, none for requests that have nothing, and what lies there."""
    kept, addresses, device = [], [], numbers.device
    for row in numbers.page_table:
        ids = torch.full((LAYERS, 2 * len(row)), WILD, dtype=torch.int32, device=device)
        ids[LAYER, : len(row)] = row
        kept.append(ids)
        addresses.append([ids.data_ptr(), ids.stride(0)])
    for request, count in enumerate(numbers.lengths.view(len(kept), -1).amax(1).tolist()):
        if count == 0:
            addresses[request] = [0, 0]
    heads, where = numbers.sequences_per_row, torch.tensor(addresses).to(device)
    runs = numbers.starts, numbers.lengths
    return AddressedNumbers(numbers.pages, where, *runs, LAYER, heads), kept


def make_queries(dtype: torch.dtype) -> Tensor:
    """[R, HEADS * GROUP, DIM] between other numbers, as behind one projection."""
    heads = HEADS * GROUP
    return random(len(REQUESTS), heads + 3, DIM, dtype=dtype)[:, 1 : heads + 1]


def attended(
    module: str, dtype: torch.dtype, device: str, bias: PagedNumbers | None
) -> tuple[Tensor, Tensor | None]:
    """Outputs of the `decode_rows` of that module of the kernels; with a bias, log-sum-exps too."""
    entries = make_entries(dtype)
    rows, kept = make_rows(entries, device)
    queries = make_queries(dtype).to(device)
    out = torch.full_like(queries, torch.nan)
    attend = importlib.import_module(f"vllm_kvcompress.kernels.{module}").decode_rows
    if bias is None:
        attend(rows, queries, DIM**-0.5, out)
        assert kept
        return out.cpu(), None
    added, lie = by_address(bias)
    lse = attend(rows, queries, DIM**-0.5, out, added, True)
    assert kept
    assert lie
    return out.cpu(), lse.cpu()


def corrected(module: str, state: PagedNumbers, outputs: Tensor, *args: object) -> Tensor:
    """Outputs after a correction from states by address."""
    kernels = importlib.import_module(f"vllm_kvcompress.kernels.{module}")
    numbers, kept = by_address(state)
    kernels.correct_with_moments(numbers, outputs, *args)
    assert kept
    return outputs


def recorded(module: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, list[Any]]:
    """The memory after a `decode_rows` of that module, the queries, and [layer, place] of each
    of their heads, None where it goes nowhere."""
    memory = torch.zeros(2, 12, DIM, dtype=dtype, device=device)
    queries = make_queries(dtype).to(device)
    places = [[3, 4, 5, 6], [None] * 4, [11, 0, 1, 9], [None] * 4, [None] * 4]
    item = memory.element_size()
    addresses = [
        [0 if place is None else memory.data_ptr() + place * DIM * item for place in row]
        for row in places
    ]
    layers = torch.tensor([7, memory.stride(0) * item]).to(device)
    rows, kept = make_rows(make_entries(dtype), device)
    rows = replace(rows, query_targets=QueryTargets(torch.tensor(addresses).to(device), layers))
    attend = importlib.import_module(f"vllm_kvcompress.kernels.{module}").decode_rows
    attend(rows, queries, DIM**-0.5, torch.empty_like(queries))
    assert kept
    return memory.cpu(), queries.cpu(), places
