"""Keys and values in pages, as kernels read them: a sequence is one KV head of one request."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.rounding import ceil_div

# Keys of a tile. With as many bytes of values, and the next tile in flight, a program takes about
# 72 KB of shared memory, so that three fit a multiprocessor of an H100 or H200.
TILE_BYTES = 1 << 14
ENTRY_ADDRESS_COLUMNS = 4  # of `AddressedEntries.addresses`


class InPages:
    """Base of what lies in pages: its device is the one of the pages."""

    pages: Tensor

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        device: torch.device = self.pages.device
        return device


class EntriesInPages(InPages):
    """Base of keys and values in pages."""

    block_size: int
    head_size: int


def tile_size(holder: EntriesInPages, tile_bytes: int = TILE_BYTES) -> int:
    """Entries of a kernel's tile so that its keys take about `tile_bytes`; a power of two."""
    row = int(holder.pages.element_size()) << (holder.head_size - 1).bit_length()
    return max(16, min(128, tile_bytes // row))


@dataclass(frozen=True)
class PagedEntries(EntriesInPages):
    """Keys and values of S sequences, found through a page table.

        page:  block_size rows of [ K: head_size ][ V: head_size ], as on vLLM's GPU backends
        sequence s:  entry j is row j % block_size of page page_table[s, j // block_size]

    Attributes:
        pages: [num_pages, 2 * block_size * head_size].
        page_table: [S, width] int32 or int64 page ids; anything behind a sequence's last page.
            Rows may be parts of longer ones.
        lengths: [S] (or [R, H] with R * H = S) int32 or int64 resident tokens.
        block_size: tokens of a page.
        head_size: elements of a key.

    Raises:
        InvariantError: shapes or types that do not fit together.
    """

    pages: Tensor
    page_table: Tensor
    lengths: Tensor
    block_size: int
    head_size: int

    def __post_init__(self) -> None:
        page = 2 * self.block_size * self.head_size
        if not (
            self.pages.dim() == 2 and self.pages.shape[1] == page and self.pages.stride(1) == 1
        ):
            raise mismatch(
                f"pages [num_pages, {page}] whose elements lie side by side",
                f"shape {tuple(self.pages.shape)} with strides {self.pages.stride()}",
                "pass the flat page view of the cache and its own block and head sizes",
            )
        if not (self.page_table.dim() == 2 and self.page_table.stride(1) == 1):
            raise mismatch(
                "a page table [sequences, width] whose rows lie side by side",
                f"shape {tuple(self.page_table.shape)} with strides {self.page_table.stride()}",
                "flatten requests and heads into one dimension and call contiguous()",
            )
        if self.lengths.numel() != self.page_table.shape[0]:
            raise mismatch(
                f"{self.page_table.shape[0]} lengths, one per row of the page table",
                str(self.lengths.numel()),
                "give every KV head of every request its own length",
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return int(self.page_table.shape[0])

    @property
    def capacity(self) -> int:
        """Entries that a row of the page table has room for: an upper bound of lengths."""
        return int(self.page_table.shape[1]) * self.block_size

    @property
    def flat_lengths(self) -> Tensor:
        """[S] contiguous lengths."""
        return self.lengths.flatten().contiguous()

    def keys(self) -> Tensor:
        """[S, capacity, head_size] keys, zeros behind the lengths (a copy)."""
        return self._gathered(0)

    def values(self) -> Tensor:
        """[S, capacity, head_size] values, zeros behind the lengths (a copy)."""
        return self._gathered(1)

    def rows_at(self, places: Tensor) -> Tensor:
        """[S, m, 2, head_size] keys and values at [S, m] int64 places (a copy).

        Places behind a sequence's last entry give arbitrary rows.
        """
        page_ids = self.page_table.gather(1, places // self.block_size)
        page_ids = page_ids.clamp(0, len(self.pages) - 1)
        return self._rows[page_ids.to(torch.int64), places % self.block_size]

    def valid(self) -> Tensor:
        """[S, capacity] bool: entries below the lengths."""
        return torch.arange(self.capacity, device=self.device) < self.flat_lengths[:, None]

    def _gathered(self, which: int) -> Tensor:
        valid = self.valid()
        held = valid[:, :: self.block_size]
        page_ids = self.page_table.to(torch.int64).masked_fill(~held, 0)
        rows = self._rows[:, :, which][page_ids].flatten(1, 2)
        return rows.masked_fill_(~valid[..., None], 0)

    @property
    def _rows(self) -> Tensor:
        """[num_pages, block_size, 2, head_size] view of the pages."""
        return self.pages.unflatten(1, (self.block_size, 2, self.head_size))


@dataclass(frozen=True)
class QueryTargets:
    """Memory that queries of R requests are copied to, by query head.

    Attributes:
        addresses: [R, Hq] int64 address for the first layer; 0: not copied.
        layer_bytes: [num_layers] int64 bytes from there to the address for each layer.
    """

    addresses: Tensor
    layer_bytes: Tensor


@dataclass(frozen=True)
class AddressedEntries(EntriesInPages):
    """Keys and values of R requests' H heads in one layer, whose page ids are found by address.

    A CUDA graph replays the launches of another step with the same arguments. So what changes
    from step to step lies in memory that stays where it is, the addresses of page ids among it.

    Attributes:
        pages, block_size, head_size: as in `PagedEntries`.
        addresses: [R, 4] int64: where a request's int32 ids begin, for the first layer and head;
            how many ids lie between layers, and between heads; and pages per block, where these
            are ids of blocks that hold the pages of all layers and heads, or 0 for ids of pages.
        lengths: [R * H] int32 resident tokens.
        tile_ends: [R * H] int32 tiles of all heads up to each one, itself included, as `sum_tiles`
            counts them.
        layer_offsets: [num_layers] int64 a layer's first page inside a block.
        layer: index of the layer.
        num_heads: H.
        query_targets: where the step's queries are copied to; None: nowhere.
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

    def paged(self) -> PagedEntries:
        """Reads the page ids, on the host only; the table has zeros behind the last id."""
        first = int(self.layer_offsets[self.layer])
        counts = ceil_div(self.lengths, self.block_size).tolist()
        table = torch.zeros((len(counts), max([1, *counts])), dtype=torch.int32)
        for sequence, count in enumerate(counts):
            request, head = divmod(sequence, self.num_heads)
            address, layers, heads, per_block = self.addresses[request].tolist()
            ids = numbers_at(address + 4 * (self.layer * layers + head * heads), count, torch.int32)
            table[sequence, :count] = ids * per_block + first + head if per_block else ids
        return PagedEntries(self.pages, table, self.lengths, self.block_size, self.head_size)


def numbers_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """[count] numbers in the host's memory, which the result shares."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def mismatch(expected: str, actual: str, remedy: str) -> InvariantError:
    """Builds the error that says what was expected, what came, and what to do.

    Steps raise it behind a condition, since formatting the sentences takes longer than the check.
    """
    return InvariantError(f"expected {expected}, got {actual}; {remedy}.")


def expect(holds: bool, expected: str, actual: str, remedy: str) -> None:
    """Raises the InvariantError of `mismatch` unless `holds`."""
    if not holds:
        raise mismatch(expected, actual, remedy)


def per_entry(entries: PagedEntries, name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [S, capacity] numbers or flags, contiguous; refuses other shapes and types."""
    shape = (entries.num_sequences, entries.capacity)
    if not (tuple(given.shape) == shape and given.dtype == dtype):
        raise mismatch(
            f"{name} {list(shape)} in {dtype}",
            f"{tuple(given.shape)} in {given.dtype}",
            "give one for every entry of the page table's rows",
        )
    return given.contiguous()


def check_queries(entries: PagedEntries, queries: Tensor, *between: str) -> None:
    """Refuses queries that are not [S, *between, D] in the pages' type, element by element."""
    sizes = (entries.num_sequences, entries.head_size)
    same_rank = queries.dim() == 2 + len(between)
    if not (same_rank and (queries.shape[0], queries.shape[-1]) == sizes):
        raise mismatch(
            f"queries [{', '.join((str(sizes[0]), *between, str(sizes[1])))}]",
            str(tuple(queries.shape)),
            "view the queries of a step as one sequence per request and KV head",
        )
    if not (queries.dtype == entries.pages.dtype and queries.stride(-1) == 1):
        raise mismatch(
            f"queries of the pages' type {entries.pages.dtype}, rows side by side",
            f"{queries.dtype} with strides {queries.stride()}",
            "convert them, or call contiguous()",
        )


def check_out(queries: Tensor, out: Tensor) -> None:
    """Refuses outputs that are not shaped like the queries, element by element."""
    if not (out.shape == queries.shape and out.stride(-1) == 1):
        raise mismatch(
            f"an output {tuple(queries.shape)} whose rows lie side by side",
            f"{tuple(out.shape)} with strides {out.stride()}",
            "leave it out, and one is made",
        )


def check_rows(entries: AddressedEntries, queries: Tensor, out: Tensor) -> None:
    """Refuses queries and outputs that are not [R, any, D] in the pages' type, element by element,
    and query targets that are not one per query."""
    shape = (len(entries.addresses), entries.head_size)
    for name, given in (("queries", queries), ("outputs", out)):
        fits = given.dim() == 3 and (given.shape[0], given.shape[2]) == shape
        if not (fits and given.stride(2) == 1 and given.dtype == entries.pages.dtype):
            raise mismatch(
                f"{name} [{shape[0]}, heads, {shape[1]}] of the pages' type {entries.pages.dtype}",
                f"{tuple(given.shape)} in {given.dtype} with strides {given.stride()}",
                "convert them, or call contiguous()",
            )
    if entries.query_targets is not None:
        addresses = entries.query_targets.addresses
        if addresses.shape != queries.shape[:2] or not addresses.is_contiguous():
            raise mismatch(
                f"addresses {list(queries.shape[:2])} side by side",
                f"{tuple(addresses.shape)} with strides {addresses.stride()}",
                "give one for every query head of every request",
            )
