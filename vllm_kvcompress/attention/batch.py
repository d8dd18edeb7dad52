"""The compressed requests of a batch as attention needs them, kept from step to step.

Host-side plans are numpy arrays; what kernels read lies on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import Integers
from vllm_kvcompress.cache.policy_state import StateNumbers
from vllm_kvcompress.kernels.common.transfers import upload

MAX_SHARED_TABLE_BYTES = 2**26  # a larger table is split into long and short rows
HostNumbers = np.ndarray[Any, np.dtype[np.integer[Any]]]
FindState: TypeAlias = Callable[[Tensor], StateNumbers | None]
RowIndex: TypeAlias = Tensor | slice
EVERY_ROW = slice(None)


def row_index(rows: Integers, device: torch.device) -> RowIndex:
    """Returns row numbers on a device, or a slice for consecutive rows, which copies none."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return upload(rows, device)


@contextmanager
def selected_rows(
    index: RowIndex, queries: Tensor, outputs: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields some rows of the queries, and their output rows, which are stored at the end."""
    if index is EVERY_ROW:
        yield queries, outputs
    elif isinstance(index, slice):
        yield queries[index], outputs[index]
    else:
        some_queries = queries[index]
        some_outputs = torch.empty_like(some_queries)
        yield some_queries, some_outputs
        outputs[index] = some_outputs


@dataclass(frozen=True)
class CompressedRows:
    """Rows of a batch that belong to compressed requests, and the others.

    Attributes:
        rows: [R] int64 compressed rows, or those of them that share a table.
        uncompressed: [U] int64 all uncompressed rows.
        slots: [R] int64 slots of `rows` in the page tables.
        device_rows, device_slots: the same on the device.
    """

    rows: Integers
    uncompressed: Integers
    slots: Integers
    device_rows: Tensor
    device_slots: Tensor

    @classmethod
    def of(
        cls, slots: Integers, device: torch.device, rows: Integers | None = None
    ) -> CompressedRows:
        """Takes the compressed `rows`, by default all, of [rows] slots, -1 where uncompressed."""
        rows = np.flatnonzero(slots >= 0) if rows is None else rows
        uncompressed = np.flatnonzero(slots < 0)
        on_device = (upload(numbers, device) for numbers in (rows, slots[rows]))
        return cls(rows, uncompressed, slots[rows], *on_device)


@dataclass(frozen=True)
class ResidentBatch(CompressedRows):
    """The compressed requests of a batch, or those of them that share a table.

    Attributes:
        page_table: [num_layers, R * num_heads, width] int32 page ids.
        seq_lens: [num_layers, R * num_heads] int32 resident tokens.
        resident_offset: [num_layers, R, num_heads] int32 resident minus logical tokens; the same
            tensor as long as the batch and its kept pages do not change.
        same_in_all_layers: whether the offsets are known to be the same in every layer.
        policy_state: state numbers that attention reads, if it reads any.
    """

    page_table: Tensor
    seq_lens: Tensor
    resident_offset: Tensor
    same_in_all_layers: bool
    policy_state: StateNumbers | None = None

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Page table and lengths of every layer, reused while both are updated in place."""
        return list(zip(self.page_table.unbind(), self.seq_lens.unbind(), strict=True))

    def take(self, which: np.ndarray[Any, np.dtype[np.bool_]]) -> Self:
        """Returns the compressed requests where [R] `which` is true."""
        if which.all():
            return self
        index = np.flatnonzero(which)
        num_heads = self.page_table.shape[1] // len(self.rows)
        heads = (index[:, None] * num_heads + np.arange(num_heads)).ravel()
        requests, sequences = (upload(each, self.seq_lens.device) for each in (index, heads))
        state = self.policy_state
        return replace(
            self,
            rows=self.rows[index],
            slots=self.slots[index],
            device_rows=self.device_rows[requests],
            device_slots=self.device_slots[requests],
            page_table=self.page_table[:, sequences],
            seq_lens=self.seq_lens[:, sequences],
            resident_offset=self.resident_offset[:, requests],
            policy_state=None if state is None else state.select(requests, sequences),
        )


class ResidentBatches:
    """Builds each step's `ResidentBatch`, most of it only when pages or requests changed.

    Where one table for all rows would be large (rows times the longest one), long rows get a table
    of their own.

    Args:
        tables: page tables of the requests.
        find_state: returns the state numbers that attention reads for requests in [R] slots; None:
            attention reads no policy state.

    Attributes:
        max_table_bytes: size of one table for all rows, above which rows are split.
    """

    def __init__(self, tables: PageTables, find_state: FindState | None = None) -> None:
        self.tables = tables
        self._find_state = find_state
        self.max_table_bytes = MAX_SHARED_TABLE_BYTES
        self._request_ids: list[str] = []
        self._version = -1
        self._parts: list[_SharedTable] = []

    def read(
        self,
        request_ids: list[str],
        num_tokens: HostNumbers,
        seq_lens: Tensor,
        block_table: Tensor,
    ) -> list[ResidentBatch]:
        """Records new tail pages and returns the batches; empty if no request is compressed.

        Args:
            request_ids: request ids of all rows of the batch.
            num_tokens: [rows] logical tokens, including this step.
            seq_lens: [rows] int32 the same on the device.
            block_table: [rows, max_blocks] int32 block ids by logical block, on the device.
        """
        if not self.tables.slots:
            return []
        if self._version != self.tables.version or self._request_ids != request_ids:
            self._rebuild(request_ids, num_tokens)
        batches = [part.read(num_tokens, seq_lens, block_table) for part in self._parts]
        self._version = self.tables.version
        return batches

    def _rebuild(self, request_ids: list[str], num_tokens: HostNumbers) -> None:
        """Looks up which rows are compressed and which of them share a table."""
        tables, slot_of = self.tables, self.tables.slots
        slots: Integers = np.array([slot_of.get(rid, -1) for rid in request_ids], dtype=np.int64)
        self._request_ids = list(request_ids)
        self._parts = []  # frees their tables before new ones are made
        compressed = np.flatnonzero(slots >= 0)
        widths = tables.widths_at(slots[compressed], num_tokens[compressed].astype(np.int64))
        column_bytes = 4 * tables.pool.num_layers * tables.pool.num_heads
        for index in _split_rows(widths, self.max_table_bytes // column_bytes):
            rows = CompressedRows.of(slots, tables.pool.device, compressed[index])
            self._parts.append(_SharedTable(tables, rows, self._find_state))


def _split_rows(widths: Integers, max_columns: int) -> list[Integers]:
    """Splits [R] rows into those that share a table: all, or the long ones and the others."""
    num_rows = len(widths)
    order: Integers = np.argsort(-widths, kind="stable")
    if num_rows < 2 or num_rows * widths[order[0]] <= max_columns:
        return [np.arange(num_rows)] if num_rows else []
    cuts = np.arange(1, num_rows)
    columns = cuts * widths[order[0]] + (num_rows - cuts) * widths[order[1:]]
    cut = int(cuts[columns.argmin()])
    return [np.sort(order[:cut]), np.sort(order[cut:])]


class _SharedTable:
    """Compressed requests of a batch that share a table.

    It is updated in place while the requests and their kept pages do not change.
    """

    def __init__(
        self, tables: PageTables, rows: CompressedRows, find_state: FindState | None
    ) -> None:
        self.tables = tables
        self._find_state = find_state
        self._rows = rows
        self._index = row_index(rows.rows, tables.pool.device)
        self._table: Tensor | None = None  # [num_layers, R, num_heads, any], room for more columns
        self._batch: ResidentBatch | None = None  # view of the columns that are in use
        self._limits: Integers = np.zeros(0, dtype=np.int64)  # logical tokens that these cover

    def read(self, num_tokens: HostNumbers, seq_lens: Tensor, block_table: Tensor) -> ResidentBatch:
        batch = self._update(num_tokens[self._rows.rows].astype(np.int64), block_table)
        num_heads = self.tables.pool.num_heads
        resident = batch.seq_lens.unflatten(1, (-1, num_heads))
        torch.add(batch.resident_offset, seq_lens[self._index, None], out=resident)
        return batch

    def _update(self, num_tokens: Integers, block_table: Tensor) -> ResidentBatch:
        """Returns the batch, extended to [R] logical tokens."""
        batch, tables, slots = self._batch, self.tables, self._rows.slots
        if batch is not None and not (num_tokens > self._limits).any():
            return batch
        width = int(tables.widths_at(slots, num_tokens).max())
        if self._table is not None and width > self._table.shape[3]:
            batch = self._batch = self._table = None  # frees it before a larger one is made
        tables.extend_tails(slots, self._rows.rows, block_table, num_tokens, self._table)
        if batch is None:
            # Widths are multiples of 16, so kernels are compiled for one alignment only.
            width_with_room = width + max(8, width // 8)
            self._table = tables.rows.read(self._rows.device_slots, width_with_room)
            batch = self._make_batch(self._table.flatten(1, 2)[:, :, :width])
        elif self._table is not None and width != batch.page_table.shape[2]:
            batch = replace(batch, page_table=self._table.flatten(1, 2)[:, :, :width])
        self._limits, self._batch = tables.tail_limits(slots), batch
        return batch

    def _make_batch(self, page_table: Tensor) -> ResidentBatch:
        """Looks up what else a batch with that table has."""
        tables, rows, find_state = self.tables, self._rows, self._find_state
        resident_offset = tables.resident_offsets(rows.slots)
        # On a GPU this comparison would synchronise.
        same_in_all_layers = resident_offset.device.type == "cpu" and bool(
            (resident_offset == resident_offset[:1]).all()
        )
        return ResidentBatch(
            **vars(rows),
            page_table=page_table,
            seq_lens=torch.empty_like(resident_offset).flatten(1),
            resident_offset=resident_offset,
            same_in_all_layers=same_in_all_layers,
            policy_state=None if find_state is None else find_state(rows.device_slots),
        )
