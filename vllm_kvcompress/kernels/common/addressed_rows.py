"""Requests of a decode step as kernels take them that a CUDA graph replays.

A replay runs the launches of another step: what they are given then, they are given for ever. So
what changes from step to step lies in memory that stays where it is, addresses among it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.rounding import ceil_div

COLUMNS, NUMBERS_COLUMNS = 4, 2  # of `addresses`


@dataclass(frozen=True)
class QueryTargets:
    """Where queries of R requests are copied to, by query head.

    Attributes:
        addresses: [R, Hq] int64 where they go in the first layer; 0: nowhere.
        layer_bytes: [num_layers] int64 how many bytes behind, in each layer.
    """

    addresses: Tensor
    layer_bytes: Tensor


@dataclass(frozen=True)
class AddressedRows:
    """R requests with one query each, H heads each, in one layer.

    Attributes:
        pages: [num_pages, 2 * block_size * head_size].
        addresses: [R, 4] int64. Where a request's int32 ids begin, for the first layer and head;
            how many ids lie between layers, and between heads; and pages per block, where these
            are ids of blocks that hold the pages of all layers and heads, or 0 for ids of pages.
        lengths: [R * H] int32 resident tokens.
        tile_ends: [R * H] int32 tiles of all heads up to each one, itself included, as `sum_tiles`
            counts them.
        layer_offsets: [num_layers] int64 a layer's first page inside a block.
        layer: of these.
        num_heads: H.
        block_size: tokens of a page.
        head_size: elements of a key.
        query_targets: where their queries are remembered; None: nowhere.
    """

    pages: Tensor
    addresses: Tensor
    lengths: Tensor
    tile_ends: Tensor
    layer_offsets: Tensor
    layer: int
    num_heads: int
    block_size: int
    head_size: int
    query_targets: QueryTargets | None = None

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        device: torch.device = self.pages.device
        return device

    def page_table(self) -> Tensor:
        """[R * H, width] int32 page ids, zeros behind the last; on the host only."""
        first = int(self.layer_offsets[self.layer])
        counts = ceil_div(self.lengths, self.block_size).tolist()
        table = torch.zeros((len(counts), max([1, *counts])), dtype=torch.int32)
        for sequence, count in enumerate(counts):
            request, head = divmod(sequence, self.num_heads)
            address, layers, heads, per_block = self.addresses[request].tolist()
            ids = numbers_at(address + 4 * (self.layer * layers + head * heads), count, torch.int32)
            table[sequence, :count] = ids * per_block + first + head if per_block else ids
        return table


@dataclass(frozen=True)
class AddressedNumbers:
    """What a policy carries of the H heads of each of these requests, or of their entries.

    Attributes:
        pages: [num_pages, numbers] fp32.
        addresses: [R, 2] int64. Where a request's int32 ids of pages with numbers begin, for the
            first layer, and how many ids lie between layers.
        starts: [R * H] int32 where each head's numbers begin in these pages.
        lengths: [R * H] int32 how many it has; 0: none, and nothing of the request is read.
        layer: as of the rows.
        num_heads: H.
    """

    pages: Tensor
    addresses: Tensor
    starts: Tensor
    lengths: Tensor
    layer: int
    num_heads: int

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        device: torch.device = self.pages.device
        return device

    @property
    def num_sequences(self) -> int:
        """R * H."""
        return int(self.starts.shape[0])

    def paged(self) -> PagedNumbers:
        """The same by page ids, which are read; on the host only."""
        ends = torch.where(self.lengths > 0, self.starts + self.lengths, 0)
        counts = ceil_div(ends.view(-1, self.num_heads).amax(1), self.pages.shape[1])
        table = torch.zeros((len(counts), max([1, *counts.tolist()])), dtype=torch.int32)
        for request, count in enumerate(counts.tolist()):
            address, layers = self.addresses[request].tolist()
            table[request, :count] = numbers_at(
                address + 4 * self.layer * layers, count, torch.int32
            )
        return PagedNumbers(self.pages, table, self.starts, self.lengths)


def check_rows(rows: AddressedRows, queries: Tensor, out: Tensor) -> None:
    """Refuses queries and outputs that are not [R, any, D] in the pages' type, element by element,
    and targets that are not one for each query.

    Raises:
        InvariantError: they are not.
    """
    shape = (len(rows.addresses), rows.head_size)
    for name, given in (("queries", queries), ("outputs", out)):
        fits = given.dim() == 3 and (given.shape[0], given.shape[2]) == shape
        if not (fits and given.stride(2) == 1 and given.dtype == rows.pages.dtype):
            raise InvariantError(
                f"expected {name} [{shape[0]}, heads, {shape[1]}] of the pages' type "
                f"{rows.pages.dtype}, got {tuple(given.shape)} in {given.dtype} with strides "
                f"{given.stride()}; convert them, or call contiguous()."
            )
    if rows.query_targets is not None:
        addresses = rows.query_targets.addresses
        if addresses.shape != queries.shape[:2] or not addresses.is_contiguous():
            raise InvariantError(
                f"expected addresses {list(queries.shape[:2])} side by side, got "
                f"{tuple(addresses.shape)} with strides {addresses.stride()}; give one for every "
                "query head of every request."
            )


def numbers_at(address: int, number: int, dtype: torch.dtype) -> Tensor:
    """[number] of the host's memory, which the result shares."""
    if number == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (number * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
