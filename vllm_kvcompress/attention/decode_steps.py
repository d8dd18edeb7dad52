"""Decode steps as CUDA graphs replay them: attention and query recording of all requests.

One kernel takes compressed and uncompressed requests as rows. Policy state and the requests whose
queries are recorded are read when it runs. What changes from step to step lies in buffers at fixed
addresses:

    step     [ fill ] -> [ layer 0: attend and record ][ layer 1: .. ] .. -> [ events ]
    replay   [ fill ] -> [ the same launches, without Python         ] .. -> [ events ]

Page tables, ring buffers and policy state may move: the fixed buffers hold their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.pages import Integers, InterleavedPagePool
from vllm_kvcompress.cache.query_windows import QueryAddresses
from vllm_kvcompress.kernels.attention import decode_rows, give_to_sinks, sum_tiles
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

ID_BYTES = 4
NO_SINKS: Mapping[int, Tensor] = {}


class _FixedBuffer:
    """[rows, columns] int64 numbers at a fixed address, written when the host's numbers change."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.numbers = torch.zeros((rows, columns), dtype=torch.int64, device=device)
        self._written: Integers | None = None

    def put(self, numbers: Integers) -> None:
        """Writes [R, columns] numbers into the first rows."""
        if self._written is None or not np.array_equal(self._written, numbers):
            self._written = numbers
            uploaded = upload(numbers, self.numbers.device)
            self.numbers[: len(numbers)].copy_(uploaded, non_blocking=True)


class _PolicyState:
    """State numbers of compressed requests that attention reads."""

    def __init__(self, pool: InterleavedPagePool, max_requests: int) -> None:
        self._pool = pool
        self._addresses = _FixedBuffer(max_requests, NUMBER_ADDRESS_COLUMNS, pool.device)
        # First number and count of each head's run.
        shape = (pool.num_layers, 2, max_requests, pool.num_heads)
        self._runs = torch.zeros(shape, dtype=torch.int32, device=pool.device)

    def fill(self, batches: list[ResidentBatch], num_requests: int) -> None:
        """Writes a step's state numbers; requests without policy state have length 0."""
        starts, lengths = self._runs[:, :, :num_requests].zero_().unbind(1)
        addresses: Integers = np.zeros((num_requests, NUMBER_ADDRESS_COLUMNS), dtype=np.int64)
        for batch in batches:
            state, by_head = batch.policy_state, (-1, self._pool.num_heads)
            assert state is not None
            row_bytes = state.page_table.stride(1) * ID_BYTES
            row_offsets = np.arange(len(batch.rows)) * row_bytes
            addresses[batch.rows, 0] = state.page_table.data_ptr() + row_offsets
            addresses[batch.rows, 1] = state.page_table.stride(0)
            starts[:, batch.device_rows] = state.starts.unflatten(1, by_head)
            lengths[:, batch.device_rows] = state.lengths.unflatten(1, by_head)
        self._addresses.put(addresses)

    def layers(self, num_requests: int) -> list[AddressedNumbers]:
        """Returns every layer's numbers, for a step of `num_requests` requests."""
        pool, addresses = self._pool, self._addresses.numbers[:num_requests]
        runs = self._runs[:, :, :num_requests].flatten(2)
        return [
            AddressedNumbers(pool.numbers, addresses, starts, lengths, layer, pool.num_heads)
            for layer, (starts, lengths) in enumerate(runs)
        ]


class DecodeSteps:
    """Decode attention of one cache group, for CUDA graphs.

    Args:
        pool: the pages.
        max_requests: largest number of requests in a step.
        num_query_heads: query heads of this rank.
        scales: softmax scale of every layer.
        pipeline: the server's policy; attention may read its biases or head states.
        records: whether any policy observes queries.
        sinks: [num_heads, group] attention sinks by layer.

    Attributes:
        like: [0, num_query_heads, head_size] tensor of the queries' type.
    """

    def __init__(
        self,
        pool: InterleavedPagePool,
        max_requests: int,
        num_query_heads: int,
        scales: list[float],
        pipeline: Pipeline,
        records: bool,
        sinks: Mapping[int, Tensor] = NO_SINKS,
    ) -> None:
        device = pool.device
        self.pool, self.scales, self._sinks = pool, scales, sinks
        self.like = pool.pages.new_empty((0, num_query_heads, pool.head_size))
        self._pipeline, self._records = pipeline, records
        self._addresses = _FixedBuffer(max_requests, ENTRY_ADDRESS_COLUMNS, device)
        shape = (pool.num_layers, max_requests, pool.num_heads)
        self._lengths = torch.zeros(shape, dtype=torch.int32, device=device)
        self._tile_ends = self._lengths.flatten(1).clone()
        # Resident minus logical tokens, 0 for uncompressed requests, and the tensors copied to it.
        self._offsets = torch.zeros_like(self._lengths)
        self._offset_sources: list[Tensor] = []
        self._placed: tuple[int, ...] = ()
        self._state: _PolicyState | None = None
        if pipeline.needs_biased_attention:
            self._state = _PolicyState(pool, max_requests)
        self._targets = _FixedBuffer(max_requests, num_query_heads, device)
        self._layer_bytes = torch.zeros(pool.num_layers, dtype=torch.int64, device=device)
        self._layer_bytes_source: Tensor | None = None
        self._view_buffers(0)

    def fill(
        self,
        batches: list[ResidentBatch],
        seq_lens: Tensor,
        block_table: Tensor,
        observed: QueryAddresses | None,
    ) -> None:
        """Writes a step's buffers before it runs or is replayed.

        Args:
            batches: the compressed requests; others are read through vLLM's block table.
            seq_lens: [R] int32 logical tokens, 0 for rows that pad the step.
            block_table: [R, any] int32 block ids.
            observed: queries to record, if there are any.
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
            if observed is not None:
                targets[observed.tokens] = observed.addresses
                if observed.layer_bytes is not self._layer_bytes_source:
                    self._layer_bytes_source = observed.layer_bytes
                    self._layer_bytes.copy_(observed.layer_bytes)
            self._targets.put(targets)

    def _place(self, batches: list[ResidentBatch], block_table: Tensor, number: int) -> None:
        """Writes addresses of page ids and length offsets, unless they are still in place.

        A batch's page table and offsets are replaced together, so comparing offsets is enough.
        """
        key = (number, block_table.data_ptr(), block_table.stride(0))
        offsets = [batch.resident_offset for batch in batches]
        known = len(offsets) == len(self._offset_sources) and all(
            map(is_, offsets, self._offset_sources)
        )
        if known and key == self._placed:
            return
        pool = self.pool
        addresses: Integers = np.zeros((number, ENTRY_ADDRESS_COLUMNS), dtype=np.int64)
        row_bytes = block_table.stride(0) * ID_BYTES
        addresses[:, 0] = block_table.data_ptr() + np.arange(number) * row_bytes
        addresses[:, 3] = pool.pages_per_block
        for batch in batches:
            table = batch.page_table
            layers, heads = table.stride(0), table.stride(1)
            request_bytes = pool.num_heads * heads * ID_BYTES
            addresses[batch.rows, 0] = table.data_ptr() + np.arange(len(batch.rows)) * request_bytes
            addresses[batch.rows, 1:] = layers, heads, 0
        self._addresses.put(addresses)
        if not known:
            self._offsets.zero_()
            for batch in batches:
                self._offsets[:, batch.device_rows] = batch.resident_offset
        self._offset_sources, self._placed = offsets, key

    def run(self, layer: int, queries: Tensor, outputs: Tensor) -> None:
        """Attends and records queries in one layer; these launches are captured.

        Args:
            layer: layer of the cache group.
            queries, outputs: [R, num_query_heads, head_size] rows of the step.
        """
        if len(queries) != self._number:
            self._view_buffers(len(queries))
        rows, scale, sinks = self._rows[layer], self.scales[layer], self._sinks.get(layer)
        bias = self._numbers[layer] if self._pipeline.weighs_entries else None
        with_lse = self._pipeline.corrects or sinks is not None
        lse = decode_rows(rows, queries, scale, outputs, bias, with_lse)
        if lse is None:
            return
        by_head = (len(rows.lengths), -1, 1, self.pool.head_size)
        heads, out = queries.reshape(by_head), outputs.view(by_head)
        if self._pipeline.corrects:
            correct_with_moments(self._numbers[layer], out, lse[..., None], heads, scale)
        if sinks is not None:
            give_to_sinks(out, lse[..., None], sinks)

    def _view_buffers(self, num_requests: int) -> None:
        """Makes views of the buffers for a step of `num_requests` requests."""
        pool, self._number = self.pool, num_requests
        targets = None
        if self._records:
            targets = QueryTargets(self._targets.numbers[:num_requests], self._layer_bytes)
        self._numbers = [] if self._state is None else self._state.layers(num_requests)
        addresses = self._addresses.numbers[:num_requests]
        sizes = (
            self._lengths[:, :num_requests].flatten(1),
            self._tile_ends[:, : num_requests * pool.num_heads],
        )
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
            for layer, (lengths, tile_ends) in enumerate(zip(*sizes, strict=True))
        ]

    def warm_up(self, block: int) -> None:
        """Compiles kernels by running one layer of a request that holds one token.

        Args:
            block: block that no request uses.
        """
        numbers = {"dtype": torch.int32, "device": self.pool.device}
        table = torch.full((1, 1), block, **numbers)
        self.fill([], torch.ones(1, **numbers), table, None)
        queries = self.like.new_zeros((1, *self.like.shape[1:]))
        self.run(0, queries, torch.empty_like(queries))
