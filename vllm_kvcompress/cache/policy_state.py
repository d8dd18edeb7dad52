"""A policy state: numbers that stay from event to event, in pages of the request's own.

    state pages of a layer:  [ per head: s numbers each ][ per entry: bias, positions, ... ]

All are fp32. Those per entry follow one another name by name (`Pipeline.token_state`), and
within a name head after head.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

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
        return PagedNumbers(pool.numbers, *self._layers[layer])

    def of_all(self, pool: PagePool) -> PagedNumbers:
        """All layers', one after the other."""
        runs = self.starts.flatten(), self.lengths.flatten()
        return PagedNumbers(pool.numbers, self.pages.flatten(0, 1), *runs)

    @cached_property
    def _layers(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        runs = self.starts.unbind(), self.lengths.unbind()
        return list(zip(self.pages.unbind(), *runs, strict=True))


@dataclass(frozen=True)
class StateRows:
    """Whose state pages are, and where these stand in the page tables.

    Attributes:
        layers: behind the first: 0, or each page's [P] int64.
        slots: of the one request, or each page's [P] int64.
        columns: [P] int64 likewise; None: of one row.
        width: of the longest row; 0: there are none.
        num_pages: P.
        firsts: [R] int64 numbers before each row's first one.
    """

    layers: int | Tensor
    slots: int | Tensor
    columns: Tensor | None
    width: int
    num_pages: int
    firsts: Tensor | None

    @classmethod
    def of(cls, rows: list[tuple[int, int, int]], pool: PagePool) -> StateRows:
        """Of [R] layers behind the first, slots and numbers of pages, row after row."""
        layers, slots, counts = np.array(rows).T
        width = int(counts.max())
        if len(rows) == 1 or width == 0:
            return cls(0, int(slots[0]), None, width, width, None)
        ends = counts.cumsum()
        columns = np.arange(ends[-1]) - (ends - counts).repeat(counts)
        of_pages = np.stack((layers.repeat(counts), slots.repeat(counts), columns))
        firsts = (ends - counts) * (pool.page_bytes // 4)
        nth, slots_there, columns_there = upload(of_pages, pool.device)
        firsts_there = upload(firsts, pool.device)
        where = nth if layers.any() else 0
        return cls(where, slots_there, columns_there, width, int(ends[-1]), firsts_there)


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
        self,
        pipeline: Pipeline,
        layer: int,
        selection: Selection,
        pages: Tensor,
        rows: StateRows,
        kept_pages: Tensor,
    ) -> None:
        """Writes what events leave to state pages, and records these.

        Zeros, where the policy leaves nothing.

        Args:
            pipeline: the policy.
            layer: of the group; the first, if they are several.
            selection: what is kept of all rows.
            pages: [P] int64 state pages, row after row.
            rows: whose they are.
            kept_pages: [R] int64 pages that each row keeps.
        """
        numbers, where = self._numbers(pipeline, selection), None
        if rows.firsts is not None:
            where = self._places(pipeline, numbers, rows.firsts, kept_pages * self.pool.block_size)
        self.pool.write_floats(pages, torch.cat(numbers), where)
        layers = rows.layers + layer
        self.tables.replace_state(layers, rows.slots, pages, rows.columns, rows.width)

    def _places(
        self, pipeline: Pipeline, numbers: list[Tensor], firsts: Tensor, kept: Tensor
    ) -> Tensor:
        """Where the numbers stand among those of all rows, [R] of which keep so many entries.

        Name by name all rows', as they were made; each row's, as they are read.
        """
        device, pool = kept.device, self.pool
        of_heads = pool.num_heads * pipeline.state_size(pool.head_size)
        places = [(firsts[:, None] + torch.arange(of_heads, device=device)).flatten()]
        if pipeline.token_state:
            num_entries = numbers[1].numel()
            whose = torch.repeat_interleave(kept, output_size=num_entries)
            nth = torch.arange(num_entries, device=device)
            here = nth + (firsts + of_heads - kept.cumsum(0) + kept)[whose]
            places += [here + which * kept[whose] for which in range(len(pipeline.token_state))]
        return torch.cat(places)

    def _numbers(self, pipeline: Pipeline, selection: Selection) -> list[Tensor]:
        """Name by name, of all rows: [numbers] fp32."""
        merged, numbers = selection.merged, [self.pool.pages.new_zeros(0, dtype=torch.float32)]
        if pipeline.state_size(self.pool.head_size):
            assert merged.state is not None
            numbers[0] = merged.state.flatten().float()
        heads = selection.heads(self.pool.block_size)
        for name in pipeline.token_state:
            entries = getattr(merged, name)
            numbers.append(entries[heads, selection.kept_indices].float())
        return numbers
