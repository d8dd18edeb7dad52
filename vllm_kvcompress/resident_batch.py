"""The compressed requests of a batch, as attention needs them, step after step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.page_tables import Books, PageTables


@dataclass(frozen=True)
class ResidentBatch:
    """The compressed requests of a batch.

    Attributes:
        rows: [R] int64 rows of the batch that are compressed, and the rest of them in `whole`.
        whole: [W] int64.
        slots: [R] the requests' rows in the page tables.
        page_table: [num_layers, R * num_heads, width] int32.
        seq_lens: [num_layers, R * num_heads] int32 resident tokens.
        alike: whether these are the same in every layer.
    """

    rows: Tensor
    whole: Tensor
    slots: Books
    page_table: Tensor
    seq_lens: Tensor
    alike: bool


@dataclass(frozen=True)
class _Gathered:
    """What stays the same while a batch decodes within its blocks.

    Attributes:
        page_table, alike: as in `ResidentBatch`.
        excess: [num_layers, R, num_heads] int32 resident minus logical tokens.
        limits: [R] logical tokens that the page table covers.
    """

    page_table: Tensor
    excess: Tensor
    limits: Books
    alike: bool


class ResidentBatches:
    """Makes each step's `ResidentBatch`, and most of it only when pages or requests changed."""

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self._request_ids: list[str] = []
        self._version = -1
        self._slots: Books = np.zeros(0, dtype=np.int64)
        self._rows = self._whole = torch.zeros(0, dtype=torch.int64)
        self._gathered: _Gathered | None = None

    def read(
        self, request_ids: list[str], seq_lens: Tensor, block_table: Tensor
    ) -> ResidentBatch | None:
        """The batch after new tail pages were booked; None where no request is compressed.

        Args:
            request_ids: of all rows of the batch.
            seq_lens: [rows] int32 logical tokens, this step's included.
            block_table: [rows, max_blocks] int32 block ids by logical block.
        """
        if not self.tables.slots:
            return None
        if self._version != self.tables.version or self._request_ids != request_ids:
            self._find(request_ids)
        if not len(self._slots):
            return None
        logical = seq_lens[self._rows]
        num_tokens = logical.numpy()
        if self._gathered is None or (num_tokens > self._gathered.limits).any():
            self._gathered = self._gather(num_tokens, block_table[self._rows])
        known = self._gathered
        resident = (known.excess + logical[:, None]).flatten(1)
        return ResidentBatch(
            rows=self._rows,
            whole=self._whole,
            slots=self._slots,
            page_table=known.page_table,
            seq_lens=resident,
            alike=known.alike,
        )

    def _find(self, request_ids: list[str]) -> None:
        """Which rows are compressed."""
        slot_of = self.tables.slots
        slots: Books = np.array([slot_of.get(rid, -1) for rid in request_ids], dtype=np.int64)
        rows = np.flatnonzero(slots >= 0)
        self._slots = slots[rows]
        self._rows = torch.from_numpy(rows)
        self._whole = torch.from_numpy(np.flatnonzero(slots < 0))
        self._request_ids, self._version = list(request_ids), self.tables.version
        self._gathered = None

    def _gather(self, num_tokens: Books, block_table: Tensor) -> _Gathered:
        tables, slots = self.tables, self._slots
        tables.extend_tails(slots, block_table, num_tokens.astype(np.int64))
        self._version = tables.version
        page_table, excess = tables.gather(slots)
        alike = bool((excess == excess[:1]).all())
        return _Gathered(page_table, excess, tables.tail_limits(slots), alike)
