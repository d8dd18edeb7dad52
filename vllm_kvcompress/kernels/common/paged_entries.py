"""Entries in pages, as kernels take them: a sequence is one KV head of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_kvcompress.errors import InvariantError

# Keys of a tile. With as many bytes of values, and the next tile in flight, a program takes about
# 72 KB of shared memory, so that three fit a multiprocessor of an H100 or H200.
TILE_BYTES = 1 << 14


class KeysInPages(Protocol):
    """Pages of keys and values, or what holds some."""

    @property
    def pages(self) -> Tensor: ...

    @property
    def head_size(self) -> int: ...


def tile_size(holder: KeysInPages, tile_bytes: int = TILE_BYTES) -> int:
    """Entries of a kernel's tile so that its keys take about `tile_bytes`; a power of two."""
    row = int(holder.pages.element_size()) << (holder.head_size - 1).bit_length()
    return max(16, min(128, tile_bytes // row))


@dataclass(frozen=True)
class PagedEntries:
    """The entries of S sequences.

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
    def device(self) -> torch.device:
        """Where the pages are."""
        device: torch.device = self.pages.device
        return device

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.page_table.shape[0])

    @property
    def capacity(self) -> int:
        """Entries that a row of the page table has room for: an upper bound of lengths."""
        return int(self.page_table.shape[1]) * self.block_size

    @property
    def flat_lengths(self) -> Tensor:
        """[S] lengths."""
        return self.lengths.flatten().contiguous()

    def keys(self) -> Tensor:
        """[S, capacity, head_size] keys, zeros behind the lengths (a copy)."""
        return self._gathered(0)

    def values(self) -> Tensor:
        """[S, capacity, head_size] values, zeros behind the lengths (a copy)."""
        return self._gathered(1)

    def rows_at(self, places: Tensor) -> Tensor:
        """[S, m, 2, head_size] keys and values at [S, m] int64 places (a copy).

        Behind a sequence's last entry anything.
        """
        page_ids = self.page_table.gather(1, places // self.block_size)
        page_ids = page_ids.clamp(0, len(self.pages) - 1)
        return self._rows[page_ids.to(torch.int64), places % self.block_size]

    def valid(self) -> Tensor:
        """[S, capacity] bool: entries below the lengths."""
        nth = torch.arange(self.capacity, device=self.device)
        return nth < self.flat_lengths[:, None]

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


def mismatch(expected: str, actual: str, remedy: str) -> InvariantError:
    """What was expected, what came, and what to do.

    To be raised behind a condition in what runs in every step, where writing the sentences would
    take longer than the check.
    """
    return InvariantError(f"expected {expected}, got {actual}; {remedy}.")


def expect(holds: bool, expected: str, actual: str, remedy: str) -> None:
    """Raises what `mismatch` says unless `holds`.

    Raises:
        InvariantError: it does not.
    """
    if not holds:
        raise mismatch(expected, actual, remedy)


def per_entry(entries: PagedEntries, name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, capacity] numbers or flags, one for each entry, side by side.

    Raises:
        InvariantError: they are not as many, or of another type.
    """
    shape = (entries.num_sequences, entries.capacity)
    if not (tuple(given.shape) == shape and given.dtype == dtype):
        raise mismatch(
            f"{name} {list(shape)} in {dtype}",
            f"{tuple(given.shape)} in {given.dtype}",
            "give one for every entry of the page table's rows",
        )
    return given.contiguous()


def check_queries(entries: PagedEntries, queries: Tensor, *between: str) -> None:
    """Refuses queries that are not [S, ..., D] in the pages' type.

    Args:
        entries: of S sequences.
        queries: with the dimensions `between`, named for the error.

    Raises:
        InvariantError: they are not.
    """
    sizes = (entries.num_sequences, entries.head_size)
    whole = queries.dim() == 2 + len(between)
    if not (whole and (queries.shape[0], queries.shape[-1]) == sizes):
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
    """Refuses outputs that are not shaped as the queries.

    Raises:
        InvariantError: they are not.
    """
    if not (out.shape == queries.shape and out.stride(-1) == 1):
        raise mismatch(
            f"an output {tuple(queries.shape)} whose rows lie side by side",
            f"{tuple(out.shape)} with strides {out.stride()}",
            "leave it out, and one is made",
        )
