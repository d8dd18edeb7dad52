"""Steps of single tokens, as a CUDA graph replays them: attention and last queries of all requests.

Compressed requests and others are rows of one kernel; what a policy carries of some of them, and
whose queries are remembered, is read when it runs. What changes from step to step lies in buffers
that stay where they are:

    step     [ fill ] -> [ layer 0: attend and record ][ layer 1: .. ] .. -> [ events ]
    replay   [ fill ] -> [ the same launches, without Python         ] .. -> [ events ]

Page tables, rings and policy state may move. Their addresses are in the buffers.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows import QueryAddresses
from vllm_kvcompress.kernels.attention import decode_rows, sum_tiles
from vllm_kvcompress.kernels.common.paged_entries import (
    ENTRY_ADDRESS_COLUMNS,
    AddressedEntries,
    QueryTargets,
    tile_size,
)
from vllm_kvcompress.kernels.common.paged_numbers import NUMBER_ADDRESS_COLUMNS, AddressedNumbers
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.merging.moments import correct_with_moments
from vllm_kvcompress.policies import Pipeline

Integers = np.ndarray[Any, np.dtype[np.int64]]
ID_BYTES = 4


class _FromHost:
    """[rows, columns] int64 that stay where they are, written when the host has others."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.numbers = torch.zeros((rows, columns), dtype=torch.int64, device=device)
        self._put: Integers | None = None

    def put(self, numbers: Integers) -> None:
        """[R, columns], into the first rows."""
        if self._put is None or not np.array_equal(self._put, numbers):
            self._put = numbers
            there = upload(numbers, self.numbers.device)
            self.numbers[: len(numbers)].copy_(there, non_blocking=True)


class _PolicyState:
    """What a policy carries of compressed requests and attention reads."""

    def __init__(self, pool: InterleavedPagePool, most_requests: int) -> None:
        self._pool = pool
        self._addresses = _FromHost(most_requests, NUMBER_ADDRESS_COLUMNS, pool.device)
        # Of each head where its numbers begin, and how many there are.
        shape = (pool.num_layers, 2, most_requests, pool.num_heads)
        self._runs = torch.zeros(shape, dtype=torch.int32, device=pool.device)

    def fill(self, batches: list[ResidentBatch], number: int) -> None:
        """Of a step of so many requests, of which those without have none."""
        starts, lengths = self._runs[:, :, :number].zero_().unbind(1)
        addresses: Integers = np.zeros((number, NUMBER_ADDRESS_COLUMNS), dtype=np.int64)
        for batch in batches:
            state, by_head = batch.policy_state, (-1, self._pool.num_heads)
            assert state is not None
            its = np.arange(len(batch.rows)) * (state.page_table.stride(1) * ID_BYTES)
            addresses[batch.rows, 0] = state.page_table.data_ptr() + its
            addresses[batch.rows, 1] = state.page_table.stride(0)
            starts[:, batch.device_rows] = state.starts.unflatten(1, by_head)
            lengths[:, batch.device_rows] = state.lengths.unflatten(1, by_head)
        self._addresses.put(addresses)

    def of_layers(self, number: int) -> list[AddressedNumbers]:
        """Of every layer, as a step of so many requests reads it."""
        pool, addresses = self._pool, self._addresses.numbers[:number]
        runs = self._runs[:, :, :number].flatten(2)
        return [
            AddressedNumbers(pool.numbers, addresses, starts, lengths, layer, pool.num_heads)
            for layer, (starts, lengths) in enumerate(runs)
        ]


class DecodeSteps:
    """One cache group's.

    Args:
        pool: the pages.
        most_requests: of a step.
        num_query_heads: of this rank.
        scales: of the logits, of every layer.
        pipeline: the server's own policy, of which attention may read biases or states.
        records: whether any policy looks at queries.

    Attributes:
        scales: as given.
        like: [0, num_query_heads, head_size] of the queries' type.
    """

    def __init__(
        self,
        pool: InterleavedPagePool,
        most_requests: int,
        num_query_heads: int,
        scales: list[float],
        pipeline: Pipeline,
        records: bool,
    ) -> None:
        device = pool.device
        self.pool, self.scales = pool, scales
        self.like = pool.pages.new_empty((0, num_query_heads, pool.head_size))
        self._pipeline, self._records = pipeline, records
        self._addresses = _FromHost(most_requests, ENTRY_ADDRESS_COLUMNS, device)
        shape = (pool.num_layers, most_requests, pool.num_heads)
        self._lengths = torch.zeros(shape, dtype=torch.int32, device=device)
        self._tile_ends = self._lengths.flatten(1).clone()
        # Resident minus logical tokens, 0 in rows of uncompressed requests; and who wrote them.
        self._offsets = torch.zeros_like(self._lengths)
        self._offsets_of: list[Tensor] = []
        self._placed: tuple[int, ...] = ()
        self._state: _PolicyState | None = None
        if pipeline.needs_biased_attention:
            self._state = _PolicyState(pool, most_requests)
        self._targets = _FromHost(most_requests, num_query_heads, device)
        self._layer_bytes = torch.zeros(pool.num_layers, dtype=torch.int64, device=device)
        self._layer_bytes_of: Tensor | None = None
        self._look(0)

    def fill(
        self,
        batches: list[ResidentBatch],
        seq_lens: Tensor,
        block_table: Tensor,
        seen: QueryAddresses | None,
    ) -> None:
        """Before a step runs, or is replayed.

        Args:
            batches: the compressed requests; all others are read by vLLM's block table.
            seq_lens: [R] int32 logical tokens, 0 for rows that pad the step.
            block_table: [R, any] int32.
            seen: whose queries are remembered; None: nobody's.
        """
        assert block_table.dtype == torch.int32
        number = len(seq_lens)
        self._place(batches, block_table, number)
        lengths = self._lengths[:, :number]
        torch.add(seq_lens[:, None], self._offsets[:, :number], out=lengths)
        tile_ends = self._tile_ends[:, : number * self.pool.num_heads]
        sum_tiles(lengths.flatten(1), tile_ends, tile_size(self.pool))
        if self._state is not None:
            self._state.fill(batches, number)
        if self._records:
            targets: Integers = np.zeros((number, self.like.shape[1]), dtype=np.int64)
            if seen is not None:
                targets[seen.tokens] = seen.addresses
                if seen.layer_bytes is not self._layer_bytes_of:
                    self._layer_bytes_of = seen.layer_bytes
                    self._layer_bytes.copy_(seen.layer_bytes)
            self._targets.put(targets)

    def _place(self, batches: list[ResidentBatch], block_table: Tensor, number: int) -> None:
        """Puts where ids are and offsets in the requests' rows, when these are not there already.

        A batch's page table and offsets are made together, so that none moves without the other.
        """
        key = (number, block_table.data_ptr(), block_table.stride(0))
        offsets = [batch.resident_offset for batch in batches]
        known = len(offsets) == len(self._offsets_of) and all(map(is_, offsets, self._offsets_of))
        if known and key == self._placed:
            return
        pool = self.pool
        addresses: Integers = np.zeros((number, ENTRY_ADDRESS_COLUMNS), dtype=np.int64)
        row_bytes = block_table.stride(0) * ID_BYTES
        addresses[:, 0] = block_table.data_ptr() + np.arange(number) * row_bytes
        addresses[:, 3] = pool.pages_per_block
        for batch in batches:
            table, its = batch.page_table, np.arange(len(batch.rows))
            layers, heads = table.stride(0), table.stride(1)
            addresses[batch.rows, 0] = table.data_ptr() + its * (pool.num_heads * heads * ID_BYTES)
            addresses[batch.rows, 1:] = layers, heads, 0
        self._addresses.put(addresses)
        if not known:
            self._offsets.zero_()
            for batch in batches:
                self._offsets[:, batch.device_rows] = batch.resident_offset
        self._offsets_of, self._placed = offsets, key

    def run(self, layer: int, queries: Tensor, outputs: Tensor) -> None:
        """What is captured of a layer.

        Args:
            layer: of the cache group.
            queries, outputs: [R, num_query_heads, head_size] of the step.
        """
        if len(queries) != self._number:
            self._look(len(queries))
        rows, scale = self._rows[layer], self.scales[layer]
        bias = self._numbers[layer] if self._pipeline.weighs_entries else None
        lse = decode_rows(rows, queries, scale, outputs, bias, self._pipeline.corrects)
        if lse is not None:
            by_head = (len(rows.lengths), -1, 1, self.pool.head_size)
            mine, out = queries.reshape(by_head), outputs.view(by_head)
            correct_with_moments(self._numbers[layer], out, lse[..., None], mine, scale)

    def _look(self, number: int) -> None:
        """At as much of the buffers as a step of so many requests reads."""
        pool, self._number = self.pool, number
        targets = None
        if self._records:
            targets = QueryTargets(self._targets.numbers[:number], self._layer_bytes)
        self._numbers = [] if self._state is None else self._state.of_layers(number)
        addresses = self._addresses.numbers[:number]
        runs = self._lengths[:, :number].flatten(1), self._tile_ends[:, : number * pool.num_heads]
        self._rows = [
            AddressedEntries(
                pages=pool.pages,
                addresses=addresses,
                lengths=lengths,
                tile_ends=tile_ends,
                layer_offsets=pool.layer_offsets,
                layer=layer,
                num_heads=pool.num_heads,
                block_size=pool.block_size,
                head_size=pool.head_size,
                query_targets=targets,
            )
            for layer, (lengths, tile_ends) in enumerate(zip(*runs, strict=True))
        ]

    def warm_up(self, block: int) -> None:
        """Runs a layer of a request that holds a token, so that no request waits for compilers.

        Args:
            block: that nobody reads.
        """
        numbers = {"dtype": torch.int32, "device": self.pool.device}
        table = torch.full((1, 1), block, **numbers)
        self.fill([], torch.ones(1, **numbers), table, None)
        queries = self.like.new_zeros((1, *self.like.shape[1:]))
        self.run(0, queries, torch.empty_like(queries))
