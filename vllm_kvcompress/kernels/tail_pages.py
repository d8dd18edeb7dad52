"""Page ids of new blocks, appended to the requests' rows, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.dispatch import by_device


@dataclass(frozen=True)
class TailRows:
    """Rows of page ids, in runs of columns: kept pages first, then a page of every later block.

    Attributes:
        runs: [num_layers, any, num_heads, columns of a run] int32 page ids.
        run_numbers: [slots, any] int64 numbers of a slot's runs, in order.
        counts: [num_layers, slots, num_heads] int32 kept pages.
        offsets: [num_layers * num_heads] int64 a layer's and head's page inside a block.
        pages_per_block: pages of a block.
    """

    runs: Tensor
    run_numbers: Tensor
    counts: Tensor
    offsets: Tensor
    pages_per_block: int

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.runs.device


@by_device("tail_pages_triton")
def append_pages(
    rows: TailRows, added: Tensor, block_table: Tensor, table: Tensor | None = None
) -> None:
    """Appends the pages of N blocks, in every layer and head, to the rows of their requests.

    Args:
        rows: rows of all slots; they have room.
        added: [5, N] int64, of each block: the request's number in the step, its slot, the pages
            between its kept ones and this one, its row in the block table, and the logical block.
        block_table: [any, any] int32 block ids.
        table: [num_layers, R, num_heads, any] int32 rows of the step's requests, with room, to
            write to as well; None: there are none.
    """
    requests, slots, between, *block = added
    num_layers, _, num_heads, run = rows.runs.shape
    offsets = rows.offsets.view(num_layers, 1, num_heads)
    ids = block_table[*block].to(torch.int64)[:, None] * rows.pages_per_block + offsets
    page_ids = ids.to(torch.int32)
    columns = rows.counts[:, slots].to(torch.int64) + between[:, None]
    layers = torch.arange(num_layers, device=rows.device)[:, None, None]
    heads = torch.arange(num_heads, device=rows.device)
    numbers = rows.run_numbers[slots[:, None], columns // run]
    rows.runs[layers, numbers, heads, columns % run] = page_ids
    if table is not None:
        table[layers, requests[:, None], heads, columns] = page_ids
