"""What a policy sees of requests' layer at their events: its pages, and what they hold.

H counts the heads of all requests of a batch, one request after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_kvcompress.cache.kv_view import PooledKV
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.policy_state import PolicyState
from vllm_kvcompress.cache.query_windows.paged import PagedWindows
from vllm_kvcompress.cache.query_windows.rings import QueryWindows
from vllm_kvcompress.kernels.common.kv_view import KVView, PagedKV
from vllm_kvcompress.policies.base import LayerView

if TYPE_CHECKING:
    from vllm_kvcompress.compression.batch import EventBatch
    from vllm_kvcompress.compression.runner import LayerWeights


@dataclass(frozen=True)
class Sources:
    """Pages that events read in one layer.

    Attributes:
        table: [H, width] int64 page ids: each head's full pages, one behind the other,
            and the partial one, if there is one; then anything.
        num_body: columns that full pages may lie in.
        partial: [H, 0 or 1] int64 the partial pages.
    """

    table: Tensor
    num_body: int
    partial: Tensor

    @property
    def body(self) -> Tensor:
        """[H, num_body] full pages."""
        return self.table[:, : self.num_body]


class EventViews:
    """Makes views.

    Args:
        policy_state: what former events left, and the page tables.
        windows: the observed queries.
        weights: of every layer.
    """

    def __init__(
        self,
        policy_state: PolicyState,
        windows: QueryWindows | PagedWindows,
        weights: Sequence[LayerWeights],
    ) -> None:
        self.policy_state = policy_state
        self.tables = policy_state.tables
        self.pool = policy_state.pool
        self.windows = windows
        self.weights = weights

    def sources(self, batch: EventBatch, layer: int) -> Sources:
        """The layer's pages that events read."""
        pool = self.pool
        heads = torch.arange(pool.num_heads, device=pool.device)
        tail = batch.blocks[:, None] * pool.pages_per_block
        tail = (tail + (pool.layer_offsets[layer] + heads)[:, None]).flatten(0, 1)
        partial = tail[:, :0]
        if batch.num_tail:
            where = batch.num_full.expand(-1, pool.num_heads).reshape(-1, 1)
            # Those without one have any page there.
            partial = tail.gather(1, where.clamp_max(tail.shape[1] - 1))
        if not batch.resident:
            return Sources(tail, batch.num_body, partial)
        # The row holds the kept pages and, behind them, the tail's.
        width = batch.num_body + partial.shape[1]
        rows = self.tables.gather(batch.slots, width, _only(layer))[0, :, :, :width]
        return Sources(rows.flatten(0, 1).to(torch.int64), batch.num_body, partial)

    def view(self, batch: EventBatch, layer: int, scale: float, sources: Sources) -> LayerView:
        """What the policy sees of the layer."""
        pool = self.pool
        counts = self.tables.counts[layer, batch.slots].to(torch.int64)
        lengths = ((counts + batch.num_full) * pool.block_size).flatten()
        num_entries = sources.num_body * pool.block_size
        weights = self.weights[layer]
        return LayerView(
            kv=self._kv(batch, layer, sources, lengths),
            queries=self._queries(batch, layer),
            scale=scale,
            layer=layer,
            num_layers=pool.num_layers,
            block_size=pool.block_size,
            output_weight=weights.output_weight,
            output_gram=weights.output_gram,
            state=self._state(batch, layer),
            bias=self._bias(batch, layer, num_entries),
            positions=self._positions(batch, layer, num_entries),
            accumulated=self._received("accumulated", batch, layer, num_entries),
            observed=self._received("observed", batch, layer, num_entries),
            running=self._received("running", batch, layer, num_entries),
            rotary=weights.rotary,
            num_requests=len(batch.events),
        )

    def _kv(self, batch: EventBatch, layer: int, sources: Sources, lengths: Tensor) -> KVView:
        """Keys and values; of a cache in the model's type nothing is gathered yet."""
        pool, num_tail, shorter = self.pool, batch.num_tail, None
        if batch.tails is not None:
            shorter = batch.tails.expand(-1, pool.num_heads).flatten()
        if isinstance(pool, InterleavedPagePool):
            whole = lengths + (num_tail if shorter is None else shorter)
            entries = pool.read_entries(sources.table, whole, layer)
            return PagedKV(lengths, num_tail, entries, sources.num_body, shorter)
        return PooledKV(lengths, num_tail, pool, layer, sources.body, sources.partial, shorter)

    def _state(self, batch: EventBatch, layer: int) -> Tensor | None:
        """[H, s] policy state of heads after the former event, if there was one."""
        if not batch.resident or not batch.pipeline.state_size(self.pool.head_size):
            return None
        runs = self.policy_state.of_heads(batch.pipeline, batch.slots, _only(layer))
        size = batch.pipeline.state_size(self.pool.head_size)
        return runs.of_layer(0, self.pool).whole(size)

    def _bias(self, batch: EventBatch, layer: int, width: int) -> Tensor | None:
        """[H, width] biases of what the former event kept; None where there are none."""
        if not batch.resident or not batch.pipeline.weighs_entries:
            return None
        return self._read_entries("bias", batch, layer, width)

    def _positions(self, batch: EventBatch, layer: int, width: int) -> Tensor | None:
        """[H, width] int64 positions of the entries that an event reads."""
        if not batch.pipeline.needs.positions:
            return None
        nth = torch.arange(width, device=self.pool.device)
        if not batch.resident:
            return nth.expand(len(batch.events) * self.pool.num_heads, -1)
        kept = self._read_entries("positions", batch, layer, width).long()
        counts = self.tables.counts[layer, batch.slots].long() * self.pool.block_size
        counts, first = counts.view(-1, 1), (batch.first_tokens - counts).view(-1, 1)
        return torch.where(nth < counts, kept, first + nth)

    def _received(self, name: str, batch: EventBatch, layer: int, width: int) -> Tensor | None:
        """[H, width] what former events have added up, if there were any."""
        if not batch.resident or name not in batch.pipeline.token_state:
            return None
        return self._read_entries(name, batch, layer, width)

    def _read_entries(self, name: str, batch: EventBatch, layer: int, width: int) -> Tensor:
        """[H, width] policy state of entries after the former event, 0 for later ones."""
        runs = self.policy_state.of_entries(batch.pipeline, name, batch.slots, _only(layer))
        return runs.of_layer(0, self.pool).gathered(width)

    def _queries(self, batch: EventBatch, layer: int) -> Tensor:
        """[window, H * G, D]."""
        if not batch.window_size:
            pool, num_rows = self.pool, len(batch.events) * self.pool.num_heads
            return pool.pages.new_zeros((0, num_rows, pool.head_size), dtype=pool.dtype)
        if batch.queries_at is None:
            plans = [event.plan for event in batch.events]
            ends = [(plan.request_id, plan.position) for plan in plans]
            batch.queries_at = self.windows.find(ends, batch.window_size)
        return self.windows.read(layer, batch.queries_at).flatten(1, 2)


def _only(layer: int) -> slice:
    """One layer."""
    return slice(layer, layer + 1)
