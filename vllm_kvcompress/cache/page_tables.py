"""Which pages every compressed request holds, per layer and KV head.

The tables persist from step to step: an event rewrites one request's row in one layer, a new
block appends one page per layer and head, and everything else stays.

    row of (layer, request, head):  [ kept pages: counts[l, r, h] ][ tail pages, one per block ]

The tables lie beside the pages. What the host has to know of them without waiting for a device
(how long tails are, how wide rows may be) is in arrays of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.common.transfers import Download, upload

Integers = np.ndarray[Any, np.dtype[np.int64]]


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


@dataclass(frozen=True)
class TailPages:
    """Pages of N blocks that were appended to tails, in every layer and head.

    Attributes:
        requests: [N] int64 whose they are, by number in the step.
        columns: [num_layers, N, num_heads] int64 their places in the requests' rows.
        page_ids: [num_layers, N, num_heads] int32.
    """

    requests: Tensor
    columns: Tensor
    page_ids: Tensor

    def write(self, table: Tensor, rows: Tensor) -> None:
        """Writes them to [num_layers, any, num_heads, width] page ids, block i's to `rows[i]`."""
        num_layers, _, num_heads = self.columns.shape
        layers = torch.arange(num_layers, device=table.device)[:, None, None]
        heads = torch.arange(num_heads, device=table.device)
        table[layers, rows[:, None], heads, self.columns] = self.page_ids


class PageTables:
    """Page tables of the compressed requests of one cache group.

    Attributes:
        pool: the pages.
        table: [num_layers, slots, num_heads, width] int32 page ids.
        counts: [num_layers, slots, num_heads] int32 kept pages.
        state: [num_layers, slots, width] int32 pages that hold the policy state.
        saved: rows of states that outlive their request, by number.
        version: changes whenever a row does.
    """

    def __init__(self, pool: PagePool) -> None:
        device = pool.pages.device
        self.pool = pool
        self.state = torch.zeros((pool.num_layers, 0, 0), dtype=torch.int32, device=device)
        self.table = torch.zeros(
            (pool.num_layers, 0, pool.num_heads, 0), dtype=torch.int32, device=device
        )
        self.counts = torch.zeros(
            (pool.num_layers, 0, pool.num_heads), dtype=torch.int32, device=device
        )
        self.tails = Tails(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        self.slots: dict[str, int] = {}
        self.layer_pages: dict[str, list[int]] = {}
        self._free_slots: list[int] = []
        self.saved: dict[int, SavedRows] = {}
        # By slot, the pages of the longest head, where the host knows an upper bound so far.
        self._longest_head: dict[int, Download] = {}
        self.version = 0

    def acquire(self, request_id: str) -> int:
        """A slot for a request that is about to be compressed for the first time."""
        if not self._free_slots:
            self._grow(max(8, 2 * self.counts.shape[1]), self.table.shape[3])
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

    def replace(
        self,
        layer: int,
        slots: int | Tensor,
        page_counts: Tensor,
        page_ids: Tensor,
        max_kept: int | None = None,
    ) -> None:
        """Sets the kept pages of requests in one layer.

        Args:
            layer: layer of the group.
            slots: a request's slot, or those of several [R] int64.
            page_counts: [R * num_heads] int64.
            page_ids: [sum(page_counts)] int64, head after head.
            max_kept: upper bound of `page_counts`, for which rows get room; None: their sum.
        """
        self.version += 1
        total = page_ids.numel()
        self._reserve(total if max_kept is None else max_kept)
        rows = torch.repeat_interleave(page_counts, output_size=total)
        starts = page_counts.cumsum(0) - page_counts
        columns = torch.arange(total, device=page_ids.device) - starts[rows]
        heads, whose = rows, slots
        if isinstance(slots, Tensor):
            heads, whose = rows % self.pool.num_heads, slots[rows // self.pool.num_heads]
        self.table[layer, whose, heads, columns] = page_ids.to(torch.int32)
        self.counts[layer, slots] = page_counts.to(torch.int32).view(-1, self.pool.num_heads)

    def replace_state(
        self,
        layer: int,
        slots: int | Tensor,
        page_ids: Tensor,
        columns: Tensor | None = None,
        width: int | None = None,
    ) -> None:
        """Sets the pages that hold the policy state of requests in one layer.

        Args:
            layer: layer of the group.
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
        self.state[layer, slots, where] = page_ids.to(torch.int32)

    def save(self, request_id: str, state: int) -> None:
        """Remembers a request's rows as a state's, for another one to begin with."""
        slot = self.slots[request_id]
        width = int(self.tails.max_kept[slot])
        self.saved[state] = SavedRows(
            self.table[:, slot, :, :width].clone(),
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
        self._reserve(saved.max_kept)
        self.table[:, slot, :, : saved.max_kept] = saved.table
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

    def extend_tails(
        self, slots: Integers, rows: Integers, block_table: Tensor, num_tokens: Integers
    ) -> TailPages | None:
        """Appends the pages of blocks that were added since the last step.

        Args:
            slots: [R] slots.
            rows: [R] the requests' rows in the block table.
            block_table: [any, max_blocks] int32 block ids by logical block.
            num_tokens: [R] logical tokens, at least up to the tail's first block.

        Returns:
            What was appended, or None.
        """
        tails, size = self.tails, self.pool.block_size
        have = tails.num_pages[slots]
        missing = -(-num_tokens // size) - tails.first_block[slots] - have
        missing = np.maximum(missing, 0)  # drafts that were taken back leave a page too many
        if not missing.any():
            return None
        self.version += 1
        self._reserve(int((self.widths(slots) + missing).max()))
        which: Integers = np.repeat(np.arange(len(slots)), missing)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(missing) - missing, missing)
        nth += have[which]
        logical = tails.first_block[slots[which]] + nth
        tails.num_pages[slots] += missing
        places = np.stack((which, slots[which], nth, rows[which], logical))
        requests, slots_there, nth_there, *block = upload(places, self.pool.device)
        added = self._tail_pages(requests, slots_there, nth_there, block_table[*block])
        added.write(self.table, slots_there)
        return added

    def _tail_pages(
        self, requests: Tensor, slots: Tensor, nth: Tensor, blocks: Tensor
    ) -> TailPages:
        """[N] each: tail page number `nth` of the request in `slots`, which lies in `blocks`."""
        pool = self.pool
        offsets = pool.block_page_offsets().view(pool.num_layers, 1, pool.num_heads)
        page_ids = blocks.to(torch.int64)[:, None] * pool.pages_per_block + offsets
        columns = self.counts[:, slots].to(torch.int64) + nth[:, None]
        return TailPages(requests, columns, page_ids.to(torch.int32))

    def gather(self, slots: Tensor, width: int) -> Tensor:
        """[num_layers, R, num_heads, width] int32 page ids of requests (a copy).

        Args:
            slots: [R] int64 slots, beside the tables.
            width: columns; zeros where the tables have fewer.
        """
        missing = max(0, width - self.table.shape[3])
        return torch.nn.functional.pad(self.table[:, slots, :, :width], (0, missing))

    def resident_offsets(self, slots: Integers) -> Tensor:
        """[num_layers, R, num_heads] int32 resident minus logical tokens."""
        first = self.tails.first_block[slots]
        index, first_block = upload(np.stack((slots, first)), self.pool.device)
        return (self.counts[:, index] - first_block.to(torch.int32)[:, None]) * self.pool.block_size

    def _reserve(self, width: int) -> None:
        if width > self.table.shape[3]:
            self._grow(self.table.shape[1], max(width, 2 * self.table.shape[3]))

    def _grow(self, num_slots: int, width: int) -> None:
        """Reallocates; rare, since sizes double."""
        old = self.table.shape[1]
        table = self.table.new_zeros((self.table.shape[0], num_slots, self.table.shape[2], width))
        table[:, :old, :, : self.table.shape[3]] = self.table
        counts = self.counts.new_zeros((self.counts.shape[0], num_slots, self.counts.shape[2]))
        counts[:, :old] = self.counts
        state = self.state.new_zeros((self.state.shape[0], num_slots, self.state.shape[2]))
        state[:, :old] = self.state
        self.table, self.counts, self.state = table, counts, state
        self._free_slots.extend(range(num_slots - 1, old - 1, -1))
        for name in ("first_block", "num_pages", "max_kept"):
            numbers: Integers = np.zeros(num_slots, dtype=np.int64)
            numbers[:old] = getattr(self.tails, name)
            setattr(self.tails, name, numbers)
