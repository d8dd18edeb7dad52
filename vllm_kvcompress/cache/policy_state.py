"""Policy state: fp32 numbers that a policy keeps from event to event, in pages of the request.

    state pages of a layer:  [ per head: s numbers each ][ per entry: bias, positions, ... ]

Numbers per entry are ordered by name (`Pipeline.token_state`), and within a name by head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
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
class StateNumbers:
    """State numbers of R requests: a run for each of their S = R * num_heads heads.

    Attributes:
        numbers: [num_pages, n] fp32 view of all pages.
        page_table: [num_layers, R, any] int32 state pages.
        starts, lengths: [num_layers, S] int32 first number and count of each head's run.
    """

    numbers: Tensor
    page_table: Tensor
    starts: Tensor
    lengths: Tensor

    def select(self, requests: Tensor, sequences: Tensor) -> StateNumbers:
        """Returns the numbers of some requests, whose heads are `sequences`."""
        return StateNumbers(
            self.numbers,
            self.page_table[:, requests],
            self.starts[:, sequences],
            self.lengths[:, sequences],
        )

    def all_layers(self) -> PagedNumbers:
        """Returns the runs of all layers, layer after layer, as kernels take them."""
        runs = self.starts.flatten(), self.lengths.flatten()
        return PagedNumbers(self.numbers, self.page_table.flatten(0, 1), *runs)

    @cached_property
    def layers(self) -> list[PagedNumbers]:
        """The runs of each layer, as kernels take them."""
        per_layer = (self.page_table, self.starts, self.lengths)
        return [PagedNumbers(self.numbers, *each) for each in zip(*per_layer, strict=True)]


@dataclass(frozen=True)
class StatePagePlaces:
    """Where the state pages of R events are recorded in the page tables.

    Attributes:
        layers: layer of each page, relative to the batch's first: 0, or [P] int64.
        slots: the slot of a single event, or [P] int64.
        columns: [P] int64 column of each page; None for a single event.
        width: state pages of the event that has most; 0: there are none.
        num_pages: P.
        offsets: [R] int64 numbers before each event's first one; None for a single event.
    """

    layers: int | Tensor
    slots: int | Tensor
    columns: Tensor | None
    width: int
    num_pages: int
    offsets: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], pool: PagePool) -> StatePagePlaces:
        """Places pages row after row, from each row's relative layer, slot and page count."""
        layers, slots, counts = np.array(rows).T
        width = int(counts.max())
        if len(rows) == 1 or width == 0:
            return cls(0, int(slots[0]), None, width, width, None)
        ends = counts.cumsum()
        columns = np.arange(ends[-1]) - (ends - counts).repeat(counts)
        per_page = np.stack((layers.repeat(counts), slots.repeat(counts), columns))
        page_layers, page_slots, page_columns = upload(per_page, pool.device)
        offsets = upload((ends - counts) * (pool.page_bytes // 4), pool.device)
        return cls(
            page_layers if layers.any() else 0,
            page_slots,
            page_columns,
            width,
            int(ends[-1]),
            offsets,
        )


class PolicyState:
    """Reads and writes the policy state of a cache group's requests.

    Args:
        tables: page tables, which record the state pages.

    Attributes:
        blocks: blocks that hold state numbers, or held them and have not been zeroed since.
    """

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.blocks: set[int] = set()

    def zero_reused_blocks(self, block_ids: Set[int]) -> None:
        """Zeroes former state blocks to which tokens are about to be written.

        Kernels may multiply values behind a request's last token by 0, and half of an fp32 number
        may be NaN as a 16-bit value.
        """
        reused = self.blocks & block_ids
        if reused:
            self.blocks -= reused
            pages_per_block = self.pool.pages_per_block
            pages = np.array(sorted(reused))[:, None] * pages_per_block + np.arange(pages_per_block)
            self.pool.pages.index_fill_(0, upload(pages.flatten(), self.pool.device), 0)

    def note_copied(self, kept: Iterable[int], tail: Iterable[int]) -> None:
        """Notes that a kept state was copied into blocks, of which only `kept` may hold numbers."""
        self.blocks.difference_update(tail)
        self.blocks.update(kept)

    def head_numbers(
        self, pipeline: Pipeline, slots: Tensor | slice, layers: slice = EVERY_LAYER
    ) -> StateNumbers:
        """Returns the numbers per head of requests in [R] slots."""
        kept, size = self._kept_entries(slots, layers), pipeline.state_size(self.pool.head_size)
        heads = torch.arange(kept.shape[2], dtype=torch.int32, device=kept.device)
        starts = (heads * size).expand_as(kept).flatten(1)
        pages = self.tables.state[layers, slots]
        return StateNumbers(self.pool.numbers, pages, starts, torch.full_like(starts, size))

    def entry_numbers(
        self, pipeline: Pipeline, name: str, slots: Tensor | slice, layers: slice = EVERY_LAYER
    ) -> StateNumbers:
        """Returns the numbers called `name` of requests' kept entries, head after head."""
        pool, kept = self.pool, self._kept_entries(slots, layers)
        starts = kept.cumsum(dim=2, dtype=torch.int32) - kept
        starts += pool.num_heads * pipeline.state_size(pool.head_size)
        if index := pipeline.token_state.index(name):
            starts += index * kept.sum(dim=2, keepdim=True, dtype=torch.int32)
        pages = self.tables.state[layers, slots]
        return StateNumbers(pool.numbers, pages, starts.flatten(1), kept.flatten(1))

    def _kept_entries(self, slots: Tensor | slice, layers: slice) -> Tensor:
        """Returns the [layers, R, num_heads] int32 numbers of kept entries."""
        return self.tables.counts[layers, slots] * self.pool.block_size

    def write(
        self,
        pipeline: Pipeline,
        layer: int,
        selection: Selection,
        pages: Tensor,
        places: StatePagePlaces,
        kept_pages: Tensor,
    ) -> None:
        """Writes the state that events leave and records its pages; unused numbers become zeros.

        Args:
            pipeline: policy of the events.
            layer: layer of the group; the first, if the events run in several.
            selection: entries that all events keep, with their state.
            pages: [P] int64 state pages, event after event.
            places: where these are recorded.
            kept_pages: [R] int64 pages of entries that each event keeps.
        """
        numbers, order = self._numbers(pipeline, selection), None
        if places.offsets is not None:
            kept = kept_pages * self.pool.block_size
            order = self._order(pipeline, numbers, places.offsets, kept)
        self.pool.write_floats(pages, torch.cat(numbers), order)
        layers = places.layers + layer
        self.tables.replace_state(layers, places.slots, pages, places.columns, places.width)

    def _order(
        self, pipeline: Pipeline, numbers: list[Tensor], offsets: Tensor, kept: Tensor
    ) -> Tensor:
        """Returns places in the state pages of `numbers`, which are sorted by name, then by event:
        each event's begin at its one of [R] `offsets` and are those of its [R] `kept` entries."""
        device, pool = kept.device, self.pool
        per_heads = pool.num_heads * pipeline.state_size(pool.head_size)
        places = [(offsets[:, None] + torch.arange(per_heads, device=device)).flatten()]
        if pipeline.token_state:
            num_entries = numbers[1].numel()
            events = torch.repeat_interleave(kept, output_size=num_entries)
            entries = torch.arange(num_entries, device=device)
            first = entries + (offsets + per_heads - kept.cumsum(0) + kept)[events]
            places += [first + name * kept[events] for name in range(len(pipeline.token_state))]
        return torch.cat(places)

    def _numbers(self, pipeline: Pipeline, selection: Selection) -> list[Tensor]:
        """Returns the fp32 numbers per head of all events, then those of each name."""
        merged, numbers = selection.merged, [self.pool.pages.new_zeros(0, dtype=torch.float32)]
        if pipeline.state_size(self.pool.head_size):
            assert merged.state is not None
            numbers[0] = merged.state.flatten().float()
        heads = selection.heads(self.pool.block_size)
        for name in pipeline.token_state:
            entries = getattr(merged, name)
            numbers.append(entries[heads, selection.kept_indices].float())
        return numbers
