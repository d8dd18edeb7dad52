"""A policy state: numbers that stay from event to event, in pages of the request's own.

    state pages of a layer:  [ per head: s numbers each ][ per entry: bias, positions, ... ]

All are fp32. Those per entry follow one another name by name (`Pipeline.token_state`), and
within a name head after head.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import Selection

EVERY_LAYER = slice(None)


@dataclass(frozen=True)
class PolicyStateRuns:
    """Where its numbers lie: a run for every KV head of R requests, S = R * num_heads.

    Attributes:
        pages: [num_layers, R, any] int32 page ids.
        starts, lengths: [num_layers, S] int32 where each head's run begins in these, and how many
            numbers it has.
    """

    pages: Tensor
    starts: Tensor
    lengths: Tensor

    def select(self, requests: Tensor, sequences: Tensor) -> PolicyStateRuns:
        """Those of some requests, whose heads are `sequences`."""
        return PolicyStateRuns(
            self.pages[:, requests], self.starts[:, sequences], self.lengths[:, sequences]
        )

    def of_layer(self, layer: int, pool: PagePool) -> PagedNumbers:
        """A layer's, as kernels take them."""
        numbers = pool.pages.view(torch.float32)
        return PagedNumbers(numbers, self.pages[layer], self.starts[layer], self.lengths[layer])


class PolicyState:
    """Finds and writes them.

    Args:
        tables: whose pages hold them.

    Attributes:
        blocks: those that hold such numbers, or did since tokens were last written to them.
    """

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.blocks: set[int] = set()

    def make_way(self, block_ids: Set[int]) -> None:
        """Zeroes those of `blocks` to which tokens are about to be written.

        Kernels may multiply values behind a request's last token by 0, and half of an fp32 number
        may be NaN as a value of 16 bits.
        """
        found = self.blocks & block_ids
        if found:
            self.blocks -= found
            within = np.arange(self.pool.pages_per_block)
            pages = np.array(sorted(found))[:, None] * self.pool.pages_per_block + within
            self.pool.pages.index_fill_(0, upload(pages.flatten(), self.pool.device), 0)

    def of_heads(
        self, pipeline: Pipeline, slots: Tensor | slice, layers: slice = EVERY_LAYER
    ) -> PolicyStateRuns:
        """The numbers per head of requests."""
        kept, size = self._kept(slots, layers), pipeline.state_size(self.pool.head_size)
        nth = torch.arange(kept.shape[2], dtype=torch.int32, device=kept.device)
        starts = (nth * size).expand_as(kept).flatten(1)
        pages = self.tables.state[layers, slots]
        return PolicyStateRuns(pages, starts, torch.full_like(starts, size))

    def of_entries(
        self, pipeline: Pipeline, name: str, slots: Tensor | slice, layers: slice = EVERY_LAYER
    ) -> PolicyStateRuns:
        """The numbers of that name of requests' kept entries, head after head."""
        pool, kept = self.pool, self._kept(slots, layers)
        starts = kept.cumsum(dim=2, dtype=torch.int32) - kept
        starts += pool.num_heads * pipeline.state_size(pool.head_size)
        if which := pipeline.token_state.index(name):
            starts += which * kept.sum(dim=2, keepdim=True, dtype=torch.int32)
        pages = self.tables.state[layers, slots]
        return PolicyStateRuns(pages, starts.flatten(1), kept.flatten(1))

    def _kept(self, slots: Tensor | slice, layers: slice) -> Tensor:
        """[layers, R, num_heads] int32 kept entries."""
        return self.tables.counts[layers, slots] * self.pool.block_size

    def write(
        self, pipeline: Pipeline, layer: int, slot: int, selection: Selection, pages: Tensor
    ) -> None:
        """Writes what an event leaves in a layer to state pages, and records these.

        Zeros, where the policy leaves nothing.
        """
        merged, numbers = selection.merged, [self.pool.pages.new_zeros(0, dtype=torch.float32)]
        if pipeline.state_size(self.pool.head_size):
            assert merged.state is not None
            numbers.append(merged.state.flatten())
        heads = selection.heads(self.pool.block_size)
        for name in pipeline.token_state:
            entries = getattr(merged, name)
            numbers.append(entries[heads, selection.kept_indices].float())
        self.pool.write_floats(pages, torch.cat(numbers).float())
        self.tables.replace_state(layer, slot, pages)
