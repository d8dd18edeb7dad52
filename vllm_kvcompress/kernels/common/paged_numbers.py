"""Policy state in pages, as kernels read it: fp32 numbers of heads, or of their entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.paged_entries import (
    InPages,
    PagedEntries,
    check_out,
    check_queries,
    mismatch,
    numbers_at,
)
from vllm_kvcompress.rounding import ceil_div

NUMBER_ADDRESS_COLUMNS = 2  # of `AddressedNumbers.addresses`


@dataclass(frozen=True)
class PagedNumbers(InPages):
    """fp32 numbers of S sequences, found through a page table whose rows H sequences share.

        sequence s:  number j is number starts[s] + j of the pages in page_table[s // H]

    Attributes:
        pages: [num_pages, numbers] fp32.
        page_table: [S / H, any] int32 or int64 page ids; anything behind the last page.
        starts: [S] int32 where each sequence's numbers begin.
        lengths: [S] int32 how many it has.

    Raises:
        InvariantError: shapes or types that do not fit together.
    """

    pages: Tensor
    page_table: Tensor
    starts: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if not (self.pages.dim() == 2 and self.pages.is_contiguous()):
            raise mismatch(
                "pages [num_pages, numbers], one behind the other",
                f"shape {tuple(self.pages.shape)} with strides {self.pages.stride()}",
                "pass the flat page view of the cache as fp32",
            )
        if self.pages.dtype != torch.float32:
            raise mismatch(
                "numbers in fp32",
                str(self.pages.dtype),
                "convert them: logarithms of multiplicities need the precision",
            )
        starts, lengths, table = self.starts.shape, self.lengths.shape, self.page_table.shape
        if not (len(table) == 2 and starts == lengths and starts[0] % max(1, table[0]) == 0):
            raise mismatch(
                "a start and a length for each of equally many sequences of every row of pages",
                f"{tuple(starts)}, {tuple(lengths)} and {tuple(table)}",
                "give every request a row, and every KV head of it a start and a length",
            )
        if self.page_table.stride(1) != 1:
            raise mismatch(
                "a page table whose rows lie side by side",
                f"strides {self.page_table.stride()}",
                "call contiguous()",
            )

    @classmethod
    def of_rows(cls, numbers: Tensor) -> PagedNumbers:
        """Wraps [S, n] fp32 numbers: a page per sequence."""
        rows = torch.arange(len(numbers), dtype=torch.int32, device=numbers.device)
        lengths = torch.full_like(rows, numbers.shape[1])
        return cls(numbers, rows[:, None], torch.zeros_like(rows), lengths)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return int(self.starts.shape[0])

    @property
    def sequences_per_row(self) -> int:
        """Sequences that share a row of the page table, H."""
        return self.num_sequences // max(1, len(self.page_table))

    def gathered(self, width: int) -> Tensor:
        """[S, width] fp32 first numbers of each sequence, zeros behind its last one (a copy)."""
        runs = self._runs(functional.pad(self._rows(), (0, width)), width)
        behind = torch.arange(width, device=self.device) >= self.lengths[:, None]
        return runs.masked_fill_(behind, 0)

    def whole(self, length: int) -> Tensor:
        """[S, length] fp32 numbers of sequences that all have `length` (a copy)."""
        return self._runs(self._rows(), length)

    def _rows(self) -> Tensor:
        """[S / H, any] fp32 numbers of the pages of each row of the table (a copy)."""
        page_ids = self.page_table.to(torch.int64).clamp(0, len(self.pages) - 1)
        return self.pages[page_ids].flatten(1)

    def _runs(self, rows: Tensor, width: int) -> Tensor:
        """[S, width] fp32 numbers from each start on (a copy, run by run)."""
        of_row = torch.arange(len(rows), device=self.device)
        of_row = of_row.repeat_interleave(self.sequences_per_row, output_size=self.num_sequences)
        return rows.unfold(1, width, 1)[of_row, self.starts.to(torch.int64)]


@dataclass(frozen=True)
class AddressedNumbers(InPages):
    """fp32 numbers of R requests' H heads in one layer, whose page ids are found by address.

    Attributes:
        pages: [num_pages, numbers] fp32.
        addresses: [R, 2] int64: where a request's int32 ids of pages with numbers begin, for the
            first layer, and how many ids lie between layers.
        starts: [R * H] int32 where each head's numbers begin in these pages.
        lengths: [R * H] int32 how many it has; 0: none, and nothing of the request is read.
        layer: index of the layer.
        num_heads: H.
    """

    pages: Tensor
    addresses: Tensor
    starts: Tensor
    lengths: Tensor
    layer: int
    num_heads: int

    @property
    def num_sequences(self) -> int:
        """Number of sequences, R * H."""
        return int(self.starts.shape[0])

    def paged(self) -> PagedNumbers:
        """Reads the page ids, on the host only; the table has zeros behind the last id."""
        ends = torch.where(self.lengths > 0, self.starts + self.lengths, 0)
        counts = ceil_div(ends.view(-1, self.num_heads).amax(1), self.pages.shape[1])
        table = torch.zeros((len(counts), max([1, *counts.tolist()])), dtype=torch.int32)
        for request, count in enumerate(counts.tolist()):
            address, layers = self.addresses[request].tolist()
            ids = numbers_at(address + 4 * self.layer * layers, count, torch.int32)
            table[request, :count] = ids
        return PagedNumbers(self.pages, table, self.starts, self.lengths)


def check_attention(
    entries: PagedEntries, queries: Tensor, out: Tensor, bias: PagedNumbers | None, *between: str
) -> None:
    """Refuses queries as `check_queries` does, outputs of another shape, and biases of another
    number of sequences than the entries have."""
    check_queries(entries, queries, *between)
    check_out(queries, out)
    if bias is not None and bias.num_sequences != entries.num_sequences:
        raise mismatch(
            f"biases of {entries.num_sequences} sequences",
            str(bias.num_sequences),
            "give every sequence some; entries behind its end have no bias",
        )
