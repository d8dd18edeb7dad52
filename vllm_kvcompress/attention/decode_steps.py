"""Steps of single tokens, as a CUDA graph replays them: attention and last queries of all requests.

Compressed requests and others are rows of one kernel, and whose queries are remembered is read
when it runs. What changes from step to step lies in buffers that stay where they are:

    step     [ fill ] -> [ layer 0: attend, record ][ layer 1: attend, record ] .. -> [ events ]
    replay   [ fill ] -> [ the same launches, without Python                  ]    -> [ events ]

Tables and rings may move. Their addresses are in the buffers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows.rings import Destinations
from vllm_kvcompress.kernels.attention import decode_rows
from vllm_kvcompress.kernels.common.addressed_rows import COLUMNS, AddressedRows
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.recording import record_queries

Integers = np.ndarray[Any, np.dtype[np.int64]]
ID_BYTES = 4


class DecodeSteps:
    """One cache group's.

    Args:
        pool: the pages.
        most_requests: of a step.
        num_query_heads: of this rank.
        scales: of the logits, of every layer.
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
        records: bool,
    ) -> None:
        device, integers = pool.device, {"dtype": torch.int64, "device": pool.device}
        self.pool, self.scales = pool, scales
        self.like = pool.pages.new_empty((0, num_query_heads, pool.head_size))
        self._records = records
        self._addresses = torch.zeros((most_requests, COLUMNS), **integers)
        shape = (pool.num_layers, most_requests, pool.num_heads)
        self._lengths = torch.zeros(shape, dtype=torch.int32, device=device)
        self._targets = torch.zeros((most_requests, num_query_heads), **integers)
        self._layer_bytes = torch.zeros(pool.num_layers, **integers)
        self._layer_bytes_of: Tensor | None = None
        self._look(0)
        # What the host has put into buffers last, so that it need not do so again.
        self._put: dict[int, Integers] = {}

    def fill(
        self,
        batches: list[ResidentBatch],
        seq_lens: Tensor,
        block_table: Tensor,
        seen: Destinations | None,
    ) -> None:
        """Before a step runs, or is replayed.

        Args:
            batches: the compressed requests; all others are read by vLLM's block table.
            seq_lens: [R] int32 logical tokens, 0 for rows that pad the step.
            block_table: [R, any] int32.
            seen: whose queries are remembered; None: nobody's.
        """
        assert block_table.dtype == torch.int32
        pool, number = self.pool, len(seq_lens)
        addresses: Integers = np.zeros((number, COLUMNS), dtype=np.int64)
        row_bytes = block_table.stride(0) * ID_BYTES
        addresses[:, 0] = block_table.data_ptr() + np.arange(number) * row_bytes
        addresses[:, 3] = pool.pages_per_block
        lengths = self._lengths[:, :number]
        lengths.copy_(seq_lens[:, None].expand(-1, pool.num_heads))
        for batch in batches:
            table, its = batch.page_table, np.arange(len(batch.rows))
            layers, heads = table.stride(0), table.stride(1)
            addresses[batch.rows, 0] = table.data_ptr() + its * (pool.num_heads * heads * ID_BYTES)
            addresses[batch.rows, 1:] = layers, heads, 0
            lengths[:, batch.device_rows] = batch.seq_lens.unflatten(1, (-1, pool.num_heads))
        self._upload(self._addresses, addresses)
        if self._records:
            targets: Integers = np.zeros((number, self._targets.shape[1]), dtype=np.int64)
            if seen is not None:
                targets[seen.tokens] = seen.addresses
                if seen.layer_bytes is not self._layer_bytes_of:
                    self._layer_bytes_of = seen.layer_bytes
                    self._layer_bytes.copy_(seen.layer_bytes)
            self._upload(self._targets, targets)

    def run(self, layer: int, queries: Tensor, outputs: Tensor) -> None:
        """What is captured of a layer.

        Args:
            layer: of the cache group.
            queries, outputs: [R, num_query_heads, head_size] of the step.
        """
        if len(queries) != self._number:
            self._look(len(queries))
        decode_rows(self._rows[layer], queries, self.scales[layer], outputs)
        if self._records:
            record_queries(queries, self._its_targets, self._layer_bytes, layer)

    def _look(self, number: int) -> None:
        """At as much of the buffers as a step of so many requests reads."""
        pool, self._number = self.pool, number
        self._its_targets, addresses = self._targets[:number], self._addresses[:number]
        self._rows = [
            AddressedRows(
                pages=pool.pages,
                addresses=addresses,
                lengths=lengths,
                layer_offsets=pool.layer_offsets,
                layer=layer,
                num_heads=pool.num_heads,
                block_size=pool.block_size,
                head_size=pool.head_size,
            )
            for layer, lengths in enumerate(self._lengths[:, :number].flatten(1).unbind())
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

    def _upload(self, buffer: Tensor, numbers: Integers) -> None:
        """Puts [R, any] numbers into the first rows of a buffer, if they are not there."""
        former = self._put.get(id(buffer))
        if former is None or not np.array_equal(former, numbers):
            self._put[id(buffer)] = numbers
            buffer[: len(numbers)].copy_(upload(numbers, buffer.device), non_blocking=True)
