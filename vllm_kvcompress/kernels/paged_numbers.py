"""Numbers in pages, as kernels take them: what a policy carries of heads, or of their entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.paged_entries import PagedEntries, expect


@dataclass(frozen=True)
class PagedNumbers:
    """fp32 numbers of S sequences, in pages of their own.

    H sequences share a row of the page table, which is theirs alone:

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
        expect(
            self.pages.dim() == 2 and self.pages.is_contiguous(),
            "pages [num_pages, numbers], one behind the other",
            f"shape {tuple(self.pages.shape)} with strides {self.pages.stride()}",
            "pass the flat page view of the cache as fp32",
        )
        expect(
            self.pages.dtype == torch.float32,
            "numbers in fp32",
            str(self.pages.dtype),
            "convert them: logarithms of multiplicities need the precision",
        )
        expect(
            self.page_table.dim() == 2
            and self.page_table.stride(1) == 1
            and self.lengths.shape == self.starts.shape == (self.num_sequences,)
            and self.num_sequences == self.sequences_per_row * len(self.page_table),
            "a start and a length for every sequence, and rows of pages that equally many share",
            f"{tuple(self.starts.shape)}, {tuple(self.lengths.shape)} and "
            f"{tuple(self.page_table.shape)}",
            "give every request a row, and every KV head of it a start and a length",
        )

    @classmethod
    def of_rows(cls, numbers: Tensor) -> PagedNumbers:
        """[S, n] fp32 numbers, a page per sequence."""
        rows = torch.arange(len(numbers), dtype=torch.int32, device=numbers.device)
        lengths = torch.full_like(rows, numbers.shape[1])
        return cls(numbers, rows[:, None], torch.zeros_like(rows), lengths)

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        device: torch.device = self.pages.device
        return device

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.starts.shape[0])

    @property
    def sequences_per_row(self) -> int:
        """H."""
        return self.num_sequences // max(1, len(self.page_table))

    def gathered(self, width: int) -> Tensor:
        """[S, width] fp32 first numbers of each sequence, zeros behind its last one (a copy)."""
        nth = torch.arange(width, device=self.device)
        held = nth < self.lengths[:, None]
        number = (self.starts[:, None] + nth).masked_fill(~held, 0)
        page_size = self.pages.shape[1]
        table = self.page_table.repeat_interleave(self.sequences_per_row, dim=0)
        page_ids = table.to(torch.int64).gather(1, number // page_size).masked_fill(~held, 0)
        return self.pages[page_ids, number % page_size].masked_fill(~held, 0)


def check_bias(entries: PagedEntries, bias: PagedNumbers | None) -> None:
    """Refuses biases of other sequences than the entries.

    Raises:
        InvariantError: they are.
    """
    if bias is not None:
        expect(
            bias.num_sequences == entries.num_sequences,
            f"biases of {entries.num_sequences} sequences",
            str(bias.num_sequences),
            "give every sequence some; entries behind its end have no bias",
        )
