"""Which part of what they hold the decoding requests of a step read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import HostNumbers, ResidentBatch
from vllm_kvcompress.cache.page_bounds import PageBounds
from vllm_kvcompress.kernels.page_choice import choose_pages
from vllm_kvcompress.scheduling.read_rule import LEAST_PAGES, ReadRule


@dataclass(frozen=True)
class Reading:
    """Requests of a step that decode, and read a part of their pages.

    Attributes:
        batch: as attention is to see them: lengths are of what is read, the page table has room
            for that, and its numbers are of the first pages.
        page_table: [num_layers, sequences, width] int32 all their pages.
        num_pages: [num_layers, sequences] int32 how many these are.
        num_read: [num_layers, sequences] int32 how many of them are read.
    """

    batch: ResidentBatch
    page_table: Tensor
    num_pages: Tensor
    num_read: Tensor

    @classmethod
    def of(cls, batch: ResidentBatch, rule: ReadRule, block_size: int) -> Reading:
        """Of requests that have one query each."""
        lengths = batch.seq_lens
        num_pages = (lengths + block_size - 1) // block_size
        chosen = rule.chosen_pages(num_pages, block_size).clamp(min=LEAST_PAGES)
        num_read = torch.where(lengths < rule.min_tokens, num_pages, num_pages.minimum(chosen))
        most = rule.most_pages(batch.page_table.shape[2], block_size)
        part = replace(
            batch,
            page_table=batch.page_table[:, :, :most],
            seq_lens=lengths - (num_pages - num_read) * block_size,
        )
        return cls(part, batch.page_table, num_pages, num_read.to(torch.int32))

    def choose(self, layer: int, queries: Tensor, bounds: PageBounds, group: str) -> Tensor:
        """[sequences, most] int32 pages that a layer reads for [sequences, group, head_size]."""
        return choose_pages(
            queries,
            bounds.bounds,
            self.page_table[layer],
            self.num_pages[layer],
            self.num_read[layer],
            self.batch.page_table.shape[2],
            group,
        )


def split(
    batch: ResidentBatch, starts: HostNumbers
) -> tuple[ResidentBatch | None, ResidentBatch | None]:
    """The requests of a batch with one query each, and the others; None: there are none.

    Args:
        batch: of a step.
        starts: [requests + 1] first token of every request of the step.
    """
    single = np.diff(starts)[batch.rows] == 1
    if single.all():
        return batch, None
    return (batch.take(single) if single.any() else None), batch.take(~single)
