"""Page tables of compressed requests: the pages of every layer and KV head.

Tables persist from step to step: an event rewrites one request's row in one layer, a new block
appends one page per layer and head, and everything else stays.

    row of (layer, request, head):  [ kept pages: counts[l, r, h] ][ tail pages, one per block ]

The tables lie on the device (`page_rows.py`). What the host has to know without synchronising,
such as the lengths of tails and upper bounds of row widths, is in numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.page_rows import RUN, PageIdRows
from vllm_kvcompress.cache.pages import Integers, PagePool
from vllm_kvcompress.kernels.common.transfers import Download, upload
from vllm_kvcompress.kernels.tail_pages import TailRows, append_pages
from vllm_kvcompress.rounding import ceil_div


@dataclass
class Tails:
    """Host-side sizes of each slot's row (numpy int64 arrays, one entry per slot).

    Attributes:
        first_block: logical block at which the tail begins.
        num_pages: tail pages that are already in the table.
        max_kept: upper bound of the kept pages of any head.
    """

    first_block: Integers
    num_pages: Integers
    max_kept: Integers


@dataclass(frozen=True)
class SavedTable:
    """Page table of a request's compressed part, which outlives the request.

    Attributes:
        table: [num_layers, num_heads, width] int32 page ids.
        counts: [num_layers, num_heads] int32 kept pages.
        state: [num_layers, width] int32 pages of the policy state.
        layer_pages: kept pages of each layer.
        max_kept: upper bound of the kept pages of any head.
    """

    table: Tensor
    counts: Tensor
    state: Tensor
    layer_pages: list[int]
    max_kept: int


class PageTables:
    """Page tables of the compressed requests of one cache group.

    Attributes:
        pool: the pages.
        rows: page ids by layer, slot, head and column.
        counts: [num_layers, slots, num_heads] int32 kept pages.
        state: [num_layers, slots, width] int32 pages of the policy state.
        tails: host-side sizes of the rows.
        slots: slot of each compressed request.
        layer_pages: kept pages of each layer, by request.
        saved: tables that outlive their request, by state number.
        version: counter that changes whenever a row does.
    """

    def __init__(self, pool: PagePool) -> None:
        device, num_layers, num_heads = pool.device, pool.num_layers, pool.num_heads
        self.pool = pool
        self.state = torch.zeros((num_layers, 0, 0), dtype=torch.int32, device=device)
        self.rows = PageIdRows(num_layers, num_heads, device)
        self.counts = torch.zeros((num_layers, 0, num_heads), dtype=torch.int32, device=device)
        self.tails = Tails(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        self.slots: dict[str, int] = {}
        self.layer_pages: dict[str, list[int]] = {}
        self.saved: dict[int, SavedTable] = {}
        self.version = 0
        self._free_slots: list[int] = []
        self._arange = torch.arange(0, device=device)
        # Pages of the longest head, by slot, while they are on their way to the host.
        self._longest_head: dict[int, Download] = {}

    def acquire(self, request_id: str) -> int:
        """Returns a slot for a request that is compressed for the first time."""
        if not self._free_slots:
            self._grow(max(8, 2 * self.counts.shape[1]))
        self.version += 1
        slot = self._free_slots.pop()
        self.slots[request_id] = slot
        self.counts[:, slot] = 0
        for sizes in vars(self.tails).values():
            sizes[slot] = 0
        return slot

    def release(self, request_id: str) -> None:
        """Frees the slot of a request that finished or was preempted; ignores unknown requests."""
        slot = self.slots.pop(request_id, None)
        self.layer_pages.pop(request_id, None)
        if slot is not None:
            self._longest_head.pop(slot, None)
            self.version += 1
            self._free_slots.append(slot)
            self.rows.shorten(slot, 0)

    def replace(
        self,
        layers: range,
        slots: int | Tensor,
        page_counts: Tensor,
        page_ids: Tensor,
        max_kept: int | None = None,
    ) -> None:
        """Sets the kept pages of one request or several in one layer or several.

        Args:
            layers: layers of the group.
            slots: slot of one request, or [R] int64 slots of several.
            page_counts: [layers * R * num_heads] int64 kept pages.
            page_ids: [sum(page_counts)] int64 pages, head after head.
            max_kept: upper bound of one request's `page_counts`, for which columns are reserved;
                None: their sum. Rows of several requests must be reserved by the caller.
        """
        self.version += 1
        total = page_ids.numel()
        if isinstance(slots, int):
            self.rows.reserve(slots, total if max_kept is None else max_kept)
        rows = torch.repeat_interleave(page_counts, output_size=total)
        starts = page_counts.cumsum(0) - page_counts
        if self._arange.numel() < total:  # kept: saves an operator per layer
            self._arange = torch.arange(2 * total, device=page_ids.device)
        columns = self._arange[:total] - starts[rows]
        num_heads, heads = self.pool.num_heads, rows
        page_layers: int | Tensor = layers.start
        page_slots, page_requests = slots, rows
        if len(layers) > 1 or isinstance(slots, Tensor):
            heads, page_requests = rows % num_heads, rows // num_heads
        if isinstance(slots, Tensor):
            page_slots = slots[page_requests % len(slots)]
            page_requests = page_requests // len(slots)
        if len(layers) > 1:
            page_layers = page_requests + layers.start
        self.rows.write(page_layers, page_slots, heads, columns, page_ids)
        counts = self.counts[layers.start : layers.stop, slots]
        self.counts[layers.start : layers.stop, slots] = page_counts.view_as(counts).to(torch.int32)

    def replace_state(
        self,
        layers: int | Tensor,
        slots: int | Tensor,
        page_ids: Tensor,
        columns: Tensor | None = None,
        width: int | None = None,
    ) -> None:
        """Sets the pages that hold the policy state of requests.

        Args:
            layers: layer of the group, or the [P] int64 layer of each page.
            slots: slot of one request, or the [P] int64 slot of each page.
            page_ids: [P] int64 state pages.
            columns: [P] int64 columns; None: 0, 1, 2, ...
            width: width of the longest row; None: P.
        """
        width = page_ids.numel() if width is None else width
        missing = width - self.state.shape[2]
        if missing > 0:
            self.state = torch.nn.functional.pad(self.state, (0, missing))
        index = slice(width) if columns is None else columns
        self.state[layers, slots, index] = page_ids.to(torch.int32)

    def kept_pages(self, slot: int, num_pages: int, state_pages: int) -> Tensor:
        """Returns the [num_pages] int64 pages that a request's last event left, layer by layer.

        Those of a layer are its heads' pages, head after head, then its `state_pages`.
        """
        width, device = int(self.tails.max_kept[slot]), self.pool.device
        rows = self.rows.read(upload([slot], device), width)[:, 0]
        held = torch.arange(rows.shape[2], device=device) < self.counts[:, slot, :, None]
        pages = torch.cat((rows.flatten(1), self.state[:, slot, :state_pages]), dim=1)
        held = torch.nn.functional.pad(held.flatten(1), (0, state_pages), value=True)
        places = torch.nonzero_static(held.flatten(), size=num_pages)[:, 0]
        return pages.flatten()[places].to(torch.int64)

    def save(self, request_id: str, state: int) -> None:
        """Saves a request's table under a state number, for another request to begin with."""
        slot = self.slots[request_id]
        width = int(self.tails.max_kept[slot])
        self.saved[state] = SavedTable(
            self.rows.read(upload([slot], self.pool.device), width)[:, 0, :, :width],
            self.counts[:, slot].clone(),
            self.state[:, slot].clone(),
            self.layer_pages[request_id],
            width,
        )

    def drop_saved(self, states: list[int]) -> None:
        """Drops saved tables that are no longer needed; ignores unknown states."""
        for state in states:
            self.saved.pop(state, None)

    def move_saved(self, state: int, former: Sequence[int], blocks: Sequence[int]) -> None:
        """Has a saved table name the pages of other blocks, into which the former were copied."""
        order = np.argsort(former)
        both = np.stack((np.array(former)[order], np.array(blocks)[order])).astype(np.int32)
        sources, targets = upload(both, self.pool.device)
        size, saved = self.pool.pages_per_block, self.saved[state]

        def moved(pages: Tensor) -> Tensor:
            numbers = pages // size
            places = torch.searchsorted(sources, numbers).clamp_(max=len(former) - 1)
            is_moved = sources[places] == numbers  # else it lies behind the last one of a row
            return torch.where(is_moved, targets[places] * size + pages % size, pages)

        self.saved[state] = replace(saved, table=moved(saved.table), state=moved(saved.state))

    def restore(self, request_id: str, state: int, first_block: int) -> None:
        """Gives a new request a saved table; its tail starts at `first_block`."""
        saved = self.saved[state]
        slot = self.acquire(request_id)
        self.rows.reserve(slot, saved.max_kept)
        self.rows.write_all(slot, saved.table)
        self.counts[:, slot] = saved.counts
        if saved.state.shape[1]:
            self.state[:, slot, : saved.state.shape[1]] = saved.state
        self.layer_pages[request_id] = saved.layer_pages
        self.begin_tail(slot, first_block, saved.max_kept)

    def begin_tail(
        self, slot: int, first_block: int, max_kept: int, longest_head: Download | None = None
    ) -> None:
        """Starts an empty tail at `first_block`, after an event.

        Args:
            slot: slot of the request.
            first_block, max_kept: as in `Tails`.
            longest_head: the exact number, if it is still on its way from the device.
        """
        self.version += 1
        self.tails.first_block[slot] = first_block
        self.tails.num_pages[slot] = 0
        self.tails.max_kept[slot] = max_kept
        self.rows.shorten(slot, max_kept)
        # A number that is still on its way from an earlier event no longer applies.
        self._longest_head.pop(slot, None)
        if longest_head is not None:
            self._longest_head[slot] = longest_head

    def poll(self) -> None:
        """Replaces upper bounds of row widths by exact widths that have arrived from the device.

        Only the device knows at once how an event divides pages among heads.
        """
        for slot, download in list(self._longest_head.items()):
            longest_head = download.value
            if longest_head is not None:
                del self._longest_head[slot]
                self.tails.max_kept[slot] = longest_head
                self.rows.shorten(slot, longest_head + int(self.tails.num_pages[slot]))
                self.version += 1

    def tail_limits(self, slots: Integers) -> Integers:
        """Returns [R] logical tokens up to which each request's tail pages are in the table."""
        num_blocks = self.tails.first_block[slots] + self.tails.num_pages[slots]
        limits: Integers = num_blocks * self.pool.block_size
        return limits

    def widths(self, slots: Integers) -> Integers:
        """Returns [R] upper bounds of the pages in each request's rows."""
        widths: Integers = self.tails.max_kept[slots] + self.tails.num_pages[slots]
        return widths

    def widths_at(self, slots: Integers, num_tokens: Integers) -> Integers:
        """Returns [R] upper bounds of the same once tails reach [R] logical tokens."""
        tails: Integers = ceil_div(num_tokens, self.pool.block_size) - self.tails.first_block[slots]
        widths: Integers = np.maximum(self.tails.max_kept[slots] + tails, self.widths(slots))
        return widths

    def extend_tails(
        self,
        slots: Integers,
        rows: Integers,
        block_table: Tensor,
        num_tokens: Integers,
        table: Tensor | None = None,
    ) -> None:
        """Appends the pages of blocks that were allocated since the last step.

        Args:
            slots: [R] slots.
            rows: [R] the requests' rows in the block table.
            block_table: [any, max_blocks] int32 block ids by logical block.
            num_tokens: [R] logical tokens, at least up to the tail's first block.
            table: [num_layers, R, num_heads, any] int32 copy of these requests' rows, with room
                for the same pages, which are appended to it too; None: there is no copy.
        """
        tails, size = self.tails, self.pool.block_size
        have, first_block = tails.num_pages[slots], tails.first_block[slots]
        missing = ceil_div(num_tokens, size) - first_block - have
        missing = np.maximum(missing, 0)  # rejected drafts may leave a page too many
        if not missing.any():
            return
        self.version += 1
        widths = tails.max_kept[slots] + have + missing
        for index in np.flatnonzero(ceil_div(widths, RUN) > self.rows.num_runs[slots]):
            self.rows.reserve(int(slots[index]), int(widths[index]))
        tails.num_pages[slots] += missing
        request: Integers = np.repeat(np.arange(len(slots)), missing)
        tail_page = np.arange(len(request)) - np.repeat(np.cumsum(missing) - missing, missing)
        tail_page += have[request]
        added = np.stack(
            (request, slots[request], tail_page, rows[request], first_block[request] + tail_page)
        )
        pages, pool = self.rows, self.pool
        sizes = (pool.block_page_offsets, pool.pages_per_block)
        tail_rows = TailRows(pages.runs, pages.run_numbers, self.counts, *sizes)
        append_pages(tail_rows, upload(added, pool.device), block_table, table)

    def resident_offsets(self, slots: Integers) -> Tensor:
        """Returns [num_layers, R, num_heads] int32 resident minus logical tokens."""
        first = self.tails.first_block[slots]
        index, first_block = upload(np.stack((slots, first)), self.pool.device)
        return (self.counts[:, index] - first_block.to(torch.int32)[:, None]) * self.pool.block_size

    def _grow(self, num_slots: int) -> None:
        """Reallocates all per-slot arrays; rare, since the number of slots doubles."""
        missing = num_slots - self.counts.shape[1]
        self._free_slots.extend(range(num_slots - 1, self.counts.shape[1] - 1, -1))
        self.rows.add_slots(num_slots)
        self.counts = torch.nn.functional.pad(self.counts, (0, 0, 0, missing))
        self.state = torch.nn.functional.pad(self.state, (0, 0, 0, missing))
        self.tails = Tails(*(np.pad(sizes, (0, missing)) for sizes in vars(self.tails).values()))
