"""Which pages every compressed request holds, per layer and KV head.

The tables persist from step to step: an event rewrites one request's row in one layer, a new
block appends one page per layer and head, and everything else stays.

    row of (layer, request, head):  [ kept pages: counts[l, r, h] ][ tail pages, one per block ]

The tables lie beside the pages, in runs of columns (`page_rows.py`), so that a long request's rows
make no other's longer. What the host has to know of them without waiting for a device
(how long tails are, how wide rows may be) is in arrays of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.page_rows import RUN, Integers, PageRows
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.common.transfers import Download, upload
from vllm_kvcompress.kernels.tail_pages import TailRows, append_pages
from vllm_kvcompress.rounding import ceil_div


@dataclass
class Tails:
    """What the host knows of the tails, one entry per slot (numpy int64 arrays).

    Attributes:
        first_block: logical block at which the tail begins.
        num_pages: tail pages that are in the table already.
        max_kept: upper bound of the kept pages of any head.
    """

    first_block: Integers
    num_pages: Integers
    max_kept: Integers


@dataclass(frozen=True)
class SavedRows:
    """Rows of a request's compressed part, which outlive it.

    Attributes:
        table: [num_layers, num_heads, width] int32 page ids.
        counts: [num_layers, num_heads] int32.
        state: [num_layers, width] int32.
        layer_pages: pages of each layer.
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
        state: [num_layers, slots, width] int32 pages that hold the policy state.
        saved: rows of states that outlive their request, by number.
        version: changes whenever a row does.
    """

    def __init__(self, pool: PagePool) -> None:
        device = pool.pages.device
        self.pool = pool
        self.state = torch.zeros((pool.num_layers, 0, 0), dtype=torch.int32, device=device)
        self.rows = PageRows(pool.num_layers, pool.num_heads, device)
        self.counts = torch.zeros(
            (pool.num_layers, 0, pool.num_heads), dtype=torch.int32, device=device
        )
        self.tails = Tails(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        self.slots: dict[str, int] = {}
        self.layer_pages: dict[str, list[int]] = {}
        self._free_slots: list[int] = []
        self._counting = torch.arange(0, device=device)
        self.saved: dict[int, SavedRows] = {}
        # By slot, the pages of the longest head, where the host knows an upper bound so far.
        self._longest_head: dict[int, Download] = {}
        self.version = 0

    def acquire(self, request_id: str) -> int:
        """A slot for a request that is about to be compressed for the first time."""
        if not self._free_slots:
            self._grow(max(8, 2 * self.counts.shape[1]))
        self.version += 1
        slot = self._free_slots.pop()
        self.slots[request_id] = slot
        self.counts[:, slot] = 0
        for numbers in (self.tails.first_block, self.tails.num_pages, self.tails.max_kept):
            numbers[slot] = 0
        return slot

    def release(self, request_id: str) -> None:
        """Forgets a request that finished or was preempted; unknown ones are ignored."""
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
        """Sets the kept pages of requests in one layer, or of one request in several.

        Args:
            layers: of the group.
            slots: a request's slot, or those of several [R] int64.
            page_counts: [layers * R * num_heads] int64.
            page_ids: [sum(page_counts)] int64, head after head.
            max_kept: upper bound of a request's `page_counts`, for which its rows get room; None:
                their sum. The rows of several have room already.
        """
        self.version += 1
        total = page_ids.numel()
        if isinstance(slots, int):
            self.rows.reserve(slots, total if max_kept is None else max_kept)
        rows = torch.repeat_interleave(page_counts, output_size=total)
        starts = page_counts.cumsum(0) - page_counts
        if self._counting.numel() < total:  # one operator less in all later layers
            self._counting = torch.arange(2 * total, device=page_ids.device)
        columns = self._counting[:total] - starts[rows]
        num_heads, heads = self.pool.num_heads, rows
        where: int | Tensor = layers.start
        whose = slots
        if len(layers) > 1:
            heads, where = rows % num_heads, rows // num_heads + layers.start
        elif isinstance(slots, Tensor):
            heads, whose = rows % num_heads, slots[rows // num_heads]
        self.rows.write(where, whose, heads, columns, page_ids)
        counts = page_counts.to(torch.int32).view(-1, num_heads)
        self.counts[layers.start : layers.stop, slots] = counts

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
            layers: a layer of the group, or each page's [P] int64.
            slots: a request's slot, or each page's [P] int64.
            page_ids: [P] int64.
            columns: [P] int64 where in their rows; None: one behind the other.
            width: of the longest row; None: all of one request.
        """
        width = page_ids.numel() if width is None else width
        missing = width - self.state.shape[2]
        if missing > 0:
            self.state = torch.nn.functional.pad(self.state, (0, missing))
        where = slice(width) if columns is None else columns
        self.state[layers, slots, where] = page_ids.to(torch.int32)

    def save(self, request_id: str, state: int) -> None:
        """Remembers a request's rows as a state's, for another one to begin with."""
        slot = self.slots[request_id]
        width = int(self.tails.max_kept[slot])
        self.saved[state] = SavedRows(
            self.gather(upload([slot], self.pool.device), width)[:, 0, :, :width],
            self.counts[:, slot].clone(),
            self.state[:, slot].clone(),
            self.layer_pages[request_id],
            width,
        )

    def drop_saved(self, states: list[int]) -> None:
        """Forgets the rows of states that nobody will begin with; unknown ones are ignored."""
        for state in states:
            self.saved.pop(state, None)

    def restore(self, request_id: str, state: int, first_block: int) -> None:
        """Gives a new request a state's rows; its tail starts at `first_block`."""
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
        """After an event: the tail starts at `first_block` and its pages are not in the table.

        Args:
            slot: the request's slot.
            first_block: logical block.
            max_kept: upper bound of the kept pages of any head.
            longest_head: its pages, exactly, where it is still to come from the device.
        """
        self.version += 1
        self.tails.first_block[slot] = first_block
        self.tails.num_pages[slot] = 0
        self.tails.max_kept[slot] = max_kept
        self.rows.shorten(slot, max_kept)
        # A number that an earlier event still waits for is no longer this row's.
        self._longest_head.pop(slot, None)
        if longest_head is not None:
            self._longest_head[slot] = longest_head

    def poll(self) -> None:
        """Takes the exact widths of rows that the device has told since, for upper bounds.

        How pages are divided among heads is known there first; until then a row counts as long as
        the division may make it.
        """
        for slot, download in list(self._longest_head.items()):
            longest_head = download.value
            if longest_head is not None:
                del self._longest_head[slot]
                self.tails.max_kept[slot] = longest_head
                self.rows.shorten(slot, longest_head + int(self.tails.num_pages[slot]))
                self.version += 1

    def tail_limits(self, slots: Integers) -> Integers:
        """[R] logical tokens up to which each request's tail pages are in the table."""
        tails = self.tails
        limits: Integers = (
            tails.first_block[slots] + tails.num_pages[slots]
        ) * self.pool.block_size
        return limits

    def widths(self, slots: Integers) -> Integers:
        """[R] upper bounds of the pages in each request's rows."""
        widths: Integers = self.tails.max_kept[slots] + self.tails.num_pages[slots]
        return widths

    def widths_at(self, slots: Integers, num_tokens: Integers) -> Integers:
        """[R] the same, once tails reach up to [R] logical tokens."""
        tails: Integers = ceil_div(num_tokens, self.pool.block_size) - self.tails.first_block[slots]
        widths: Integers = np.maximum(self.tails.max_kept[slots] + tails, self.widths(slots))
        return widths

    @property
    def column_bytes(self) -> int:
        """Of one page of every layer and head."""
        return 4 * self.pool.num_layers * self.pool.num_heads

    def extend_tails(
        self,
        slots: Integers,
        rows: Integers,
        block_table: Tensor,
        num_tokens: Integers,
        table: Tensor | None = None,
    ) -> None:
        """Appends the pages of blocks that were added since the last step.

        Args:
            slots: [R] slots.
            rows: [R] the requests' rows in the block table.
            block_table: [any, max_blocks] int32 block ids by logical block.
            num_tokens: [R] logical tokens, at least up to the tail's first block.
            table: [num_layers, R, num_heads, any] int32 a copy of these requests' rows that gets
                the same pages, and has room for them; None: there is none.
        """
        tails, size = self.tails, self.pool.block_size
        have, first_block = tails.num_pages[slots], tails.first_block[slots]
        missing = ceil_div(num_tokens, size) - first_block - have
        missing = np.maximum(missing, 0)  # drafts that were taken back leave a page too many
        if not missing.any():
            return
        self.version += 1
        widths = tails.max_kept[slots] + have + missing
        for nth in np.flatnonzero(ceil_div(widths, RUN) > self.rows.num_runs[slots]):
            self.rows.reserve(int(slots[nth]), int(widths[nth]))
        tails.num_pages[slots] += missing
        which: Integers = np.repeat(np.arange(len(slots)), missing)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(missing) - missing, missing)
        nth += have[which]
        added = np.stack((which, slots[which], nth, rows[which], first_block[which] + nth))
        append_pages(self._tail_rows(), upload(added, self.pool.device), block_table, table)

    def _tail_rows(self) -> TailRows:
        """The rows of all slots, as they lie."""
        pool, rows = self.pool, self.rows
        offsets, per_block = pool.block_page_offsets, pool.pages_per_block
        return TailRows(rows.runs, rows.run_numbers, self.counts, offsets, per_block)

    def gather(self, slots: Tensor, width: int, layers: slice = slice(None)) -> Tensor:
        """As `PageRows.read`: page ids of requests in [R] slots, `width` columns or a few more."""
        return self.rows.read(slots, width, layers)

    def resident_offsets(self, slots: Integers) -> Tensor:
        """[num_layers, R, num_heads] int32 resident minus logical tokens."""
        first = self.tails.first_block[slots]
        index, first_block = upload(np.stack((slots, first)), self.pool.device)
        return (self.counts[:, index] - first_block.to(torch.int32)[:, None]) * self.pool.block_size

    def _grow(self, num_slots: int) -> None:
        """Reallocates what there is of every slot; rare, since their number doubles."""
        old = self.counts.shape[1]
        self.rows.add_slots(num_slots)
        counts = self.counts.new_zeros((self.counts.shape[0], num_slots, self.counts.shape[2]))
        counts[:, :old] = self.counts
        state = self.state.new_zeros((self.state.shape[0], num_slots, self.state.shape[2]))
        state[:, :old] = self.state
        self.counts, self.state = counts, state
        self._free_slots.extend(range(num_slots - 1, old - 1, -1))
        for name in ("first_block", "num_pages", "max_kept"):
            numbers: Integers = np.zeros(num_slots, dtype=np.int64)
            numbers[:old] = getattr(self.tails, name)
            setattr(self.tails, name, numbers)
