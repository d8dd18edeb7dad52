"""The compressed requests of a batch, as attention needs them, step after step.

What is planned on the host lies there in numpy arrays, what kernels read lies beside the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.query_rows import places
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import Integers
from vllm_kvcompress.cache.policy_state import StateNumbers
from vllm_kvcompress.kernels.common.transfers import upload

MAX_SHARED_TABLE_BYTES = (
    2**26
)  # of a table for all rows; rarely more, where one request is far longer
HostNumbers = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True)
class BatchRows:
    """Which rows of a batch are compressed.

    Attributes:
        rows: [R] int64 the compressed ones, or those of them that are together.
        uncompressed: [U] int64 the others.
        slots: [R] int64 rows in the page tables of the compressed ones.
        device_rows, device_uncompressed, device_slots: the same beside the pages.
    """

    rows: Integers
    uncompressed: Integers
    slots: Integers
    device_rows: Tensor
    device_uncompressed: Tensor
    device_slots: Tensor

    @classmethod
    def of(cls, slots: Integers, device: torch.device, rows: Integers | None = None) -> BatchRows:
        """Of [rows] slots, -1 where a request is uncompressed; of the others all, or `rows`."""
        rows = np.flatnonzero(slots >= 0) if rows is None else rows
        uncompressed = np.flatnonzero(slots < 0)
        host = (rows, uncompressed, slots[rows])
        return cls(*host, *(upload(numbers, device) for numbers in host))


@dataclass(frozen=True)
class ResidentBatch(BatchRows):
    """The compressed requests of a batch.

    Attributes:
        page_table: [num_layers, R * num_heads, width] int32, rows side by side.
        seq_lens: [num_layers, R * num_heads] int32 resident tokens.
        resident_offset: [num_layers, R, num_heads] int32 resident minus logical tokens; the same
            tensor as long as the batch and its kept pages are the same.
        same_in_all_layers: whether these are known to be the same in every layer.
        policy_state: what attention reads of it; None: nothing.
    """

    page_table: Tensor
    seq_lens: Tensor
    resident_offset: Tensor
    same_in_all_layers: bool
    policy_state: StateNumbers | None = None

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's page table and lengths; a step whose requests are the last one's makes no
        others, since both are written where they lie."""
        return list(zip(self.page_table.unbind(), self.seq_lens.unbind(), strict=True))

    def take(self, which: np.ndarray[Any, np.dtype[np.bool_]]) -> Self:
        """Those of the compressed requests that [R] says, without what else attention reads."""
        index = np.flatnonzero(which)
        num_heads = self.page_table.shape[1] // len(self.rows)
        heads = (index[:, None] * num_heads + np.arange(num_heads)).ravel()
        requests, sequences = (upload(places, self.seq_lens.device) for places in (index, heads))
        return replace(
            self,
            rows=self.rows[index],
            slots=self.slots[index],
            device_rows=self.device_rows[requests],
            device_slots=self.device_slots[requests],
            page_table=self.page_table[:, sequences],
            seq_lens=self.seq_lens[:, sequences],
            resident_offset=self.resident_offset[:, requests],
            policy_state=None,
        )


@dataclass
class _LastingPages:
    """What stays from step to step, while the batch and its kept pages are the same.

    Attributes:
        table: [num_layers, R, num_heads, any] int32 page ids, with room for what comes.
        limits: [R] logical tokens that the table covers.
        batch: which looks at as much of the table as is in use.
    """

    table: Tensor
    limits: Integers
    batch: ResidentBatch


class ResidentBatches:
    """Makes each step's `ResidentBatch`, and most of it only when pages or requests changed.

    There are two where one table of all rows would be large, as many rows times the longest: then
    the long ones have a table of their own.

    Args:
        tables: of the requests.
        find_state: finds what attention reads of policy state, for requests in [R] slots; None:
            nothing.
        most_bytes: of one table of all rows.
    """

    def __init__(
        self,
        tables: PageTables,
        find_state: Callable[[Tensor], StateNumbers | None] | None = None,
        most_bytes: int = MAX_SHARED_TABLE_BYTES,
    ) -> None:
        self.tables = tables
        self._find_state = find_state
        self._most_bytes = most_bytes
        self._request_ids: list[str] = []
        self._version = -1
        self._parts: list[_Part] = []

    def read(
        self,
        request_ids: list[str],
        num_tokens: HostNumbers,
        seq_lens: Tensor,
        block_table: Tensor,
    ) -> list[ResidentBatch]:
        """The batch after new tail pages were recorded; empty where no request is compressed.

        Args:
            request_ids: of all rows of the batch.
            num_tokens: [rows] logical tokens, this step's included.
            seq_lens: [rows] int32 the same, beside the pages.
            block_table: [rows, max_blocks] int32 block ids by logical block, beside the pages.
        """
        if not self.tables.slots:
            return []
        if self._version != self.tables.version or self._request_ids != request_ids:
            self._find(request_ids, num_tokens)
        found = [part.read(num_tokens, seq_lens, block_table) for part in self._parts]
        self._version = self.tables.version
        return found

    def _find(self, request_ids: list[str], num_tokens: HostNumbers) -> None:
        """Which rows are compressed."""
        tables, slot_of = self.tables, self.tables.slots
        slots: Integers = np.array([slot_of.get(rid, -1) for rid in request_ids], dtype=np.int64)
        self._request_ids = list(request_ids)
        self._parts = []  # so that their tables need not lie beside the new ones
        which = np.flatnonzero(slots >= 0)
        widths = tables.widths_at(slots[which], num_tokens[which].astype(np.int64))
        for some in _side_by_side(widths, self._most_bytes // tables.column_bytes):
            rows = BatchRows.of(slots, tables.pool.device, which[some])
            self._parts.append(_Part(tables, rows, self._find_state))


def _side_by_side(widths: Integers, most_columns: int) -> list[Integers]:
    """Which of [R] rows share a table: all, or the long ones and the others."""
    number = len(widths)
    order: Integers = np.argsort(-widths, kind="stable")
    if number < 2 or number * widths[order[0]] <= most_columns:
        return [np.arange(number)] if number else []
    cuts = np.arange(1, number)
    columns = cuts * widths[order[0]] + (number - cuts) * widths[order[1:]]
    cut = int(cuts[columns.argmin()])
    return [np.sort(order[:cut]), np.sort(order[cut:])]


class _Part:
    """Compressed requests of a batch that share a table."""

    def __init__(
        self,
        tables: PageTables,
        rows: BatchRows,
        find_state: Callable[[Tensor], StateNumbers | None] | None,
    ) -> None:
        self.tables = tables
        self._find_state = find_state
        self._rows = rows
        self._where = places(rows.rows, tables.pool.device)
        self._pages: _LastingPages | None = None

    def read(self, num_tokens: HostNumbers, seq_lens: Tensor, block_table: Tensor) -> ResidentBatch:
        """As `ResidentBatches.read`."""
        known = self._covering(num_tokens[self._rows.rows].astype(np.int64), block_table)
        batch, num_heads = known.batch, self.tables.pool.num_heads
        resident = batch.seq_lens.unflatten(1, (-1, num_heads))
        torch.add(batch.resident_offset, seq_lens[self._where, None], out=resident)
        return batch

    def _covering(self, num_tokens: Integers, block_table: Tensor) -> _LastingPages:
        """What is known of the batch, brought up to [R] logical tokens."""
        known = self._pages
        if known is not None and not (num_tokens > known.limits).any():
            return known
        tables, slots = self.tables, self._rows.slots
        width = int(tables.widths_at(slots, num_tokens).max())
        if known is not None and width > known.table.shape[3]:
            known = self._pages = None  # so that it need not lie beside what follows it
        table = None if known is None else known.table
        tables.extend_tails(slots, self._rows.rows, block_table, num_tokens, table)
        if known is None:
            known = self._pages = self._read_tables(width)
        elif width != known.batch.page_table.shape[2]:
            page_table = known.table.flatten(1, 2)[:, :, :width]
            known.batch = replace(known.batch, page_table=page_table)
        known.limits = tables.tail_limits(slots)
        return known

    def _read_tables(self, width: int) -> _LastingPages:
        """The batch's rows of the tables, with room for an eighth more columns.

        Rows are whole runs, multiples of 16 numbers: kernels need to be compiled for no other kind.
        """
        tables, found = self.tables, self._rows
        table = tables.rows.read(found.device_slots, width + max(8, width // 8))
        resident_offset = tables.resident_offsets(found.slots)
        # Only the CPU can look without waiting for what runs on the device.
        same_in_all_layers = resident_offset.device.type == "cpu" and bool(
            (resident_offset == resident_offset[:1]).all()
        )
        find_state = self._find_state
        batch = ResidentBatch(
            **vars(found),
            page_table=table.flatten(1, 2)[:, :, :width],
            seq_lens=torch.empty_like(resident_offset).flatten(1),
            resident_offset=resident_offset,
            same_in_all_layers=same_in_all_layers,
            policy_state=None if find_state is None else find_state(found.device_slots),
        )
        return _LastingPages(table, tables.tail_limits(found.slots), batch)
