"""What a policy sees of a request's layer at an event: its pages, and what they hold."""

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
from vllm_kvcompress.scheduling.plan import EventPlan

if TYPE_CHECKING:
    from vllm_kvcompress.compression.runner import Event, LayerWeights


@dataclass(frozen=True)
class Sources:
    """Pages that an event reads in one layer.

    Attributes:
        table: [num_heads, width] int64 page ids: each head's full pages, one behind the other,
            and the partial one, if there is one; then anything.
        num_body: columns that full pages may lie in.
        partial: [num_heads, 0 or 1] int64 the partial pages.
    """

    table: Tensor
    num_body: int
    partial: Tensor

    @property
    def body(self) -> Tensor:
        """[num_heads, num_body] full pages."""
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

    def sources(self, event: Event, layer: int) -> Sources:
        """The layer's pages that the event reads."""
        pool, plan = self.pool, event.plan
        heads = torch.arange(pool.num_heads, device=pool.device)
        tail = event.blocks * pool.pages_per_block + (pool.layer_offsets[layer] + heads)[:, None]
        num_full = plan.end_block - plan.first_block
        if not plan.resident_blocks:
            return Sources(tail, num_full, tail[:, num_full:])
        # The row holds the kept pages and, behind them, the tail's.
        num_body = int(self.tables.tails.max_kept[event.slot]) + num_full
        num_partial = tail.shape[1] - num_full
        row = self.tables.table[layer, event.slot, :, : num_body + num_partial]
        return Sources(row.to(torch.int64), num_body, tail[:, num_full:])

    def view(self, event: Event, layer: int, scale: float, sources: Sources) -> LayerView:
        """What the policy sees of the layer."""
        pool, plan = self.pool, event.plan
        counts = self.tables.counts[layer, event.slot].to(torch.int64)
        lengths = (counts + plan.end_block - plan.first_block) * pool.block_size
        num_entries = sources.num_body * pool.block_size
        weights = self.weights[layer]
        return LayerView(
            kv=self._kv(event, sources, lengths),
            queries=self._queries(plan, layer),
            scale=scale,
            layer=layer,
            num_layers=pool.num_layers,
            block_size=pool.block_size,
            output_weight=weights.output_weight,
            output_gram=weights.output_gram,
            state=self._state(event, layer),
            bias=self._bias(event, layer, num_entries),
            positions=self._positions(event, layer, num_entries),
            accumulated=self._received("accumulated", event, layer, num_entries),
            observed=self._received("observed", event, layer, num_entries),
            running=self._received("running", event, layer, num_entries),
            rotary=weights.rotary,
        )

    def _kv(self, event: Event, sources: Sources, lengths: Tensor) -> KVView:
        """Keys and values; nothing is gathered yet."""
        pool, num_tail = self.pool, event.plan.position % self.pool.block_size
        if isinstance(pool, InterleavedPagePool):
            entries = pool.entries(sources.table, lengths + num_tail)
            return PagedKV(lengths, num_tail, entries, sources.num_body)
        return PooledKV(lengths, num_tail, pool, sources.body, sources.partial)

    def _state(self, event: Event, layer: int) -> Tensor | None:
        """[num_heads, s] policy state of heads after the former event, if there was one."""
        if not event.plan.resident_blocks or not event.pipeline.state_size(self.pool.head_size):
            return None
        runs = self.policy_state.of_heads(event.pipeline, *_only(event.slot, layer))
        size = event.pipeline.state_size(self.pool.head_size)
        return runs.of_layer(0, self.pool).whole(size)

    def _bias(self, event: Event, layer: int, width: int) -> Tensor | None:
        """[num_heads, width] biases of what the former event kept; None where there are none."""
        if not event.plan.resident_blocks or not event.pipeline.weighs_entries:
            return None
        return self._read_entries("bias", event, layer, width)

    def _positions(self, event: Event, layer: int, width: int) -> Tensor | None:
        """[num_heads, width] int64 positions of the entries that an event reads."""
        if not event.pipeline.needs.positions:
            return None
        nth = torch.arange(width, device=self.pool.device)
        if not event.plan.resident_blocks:
            return nth.expand(self.pool.num_heads, -1)
        kept = self._read_entries("positions", event, layer, width).long()
        counts = self.tables.counts[layer, event.slot].long()[:, None] * self.pool.block_size
        tail = event.plan.first_block * self.pool.block_size + nth - counts
        return torch.where(nth < counts, kept, tail)

    def _received(self, name: str, event: Event, layer: int, width: int) -> Tensor | None:
        """[num_heads, width] what former events have added up, if there were any."""
        if not event.plan.resident_blocks or name not in event.pipeline.token_state:
            return None
        return self._read_entries(name, event, layer, width)

    def _read_entries(self, name: str, event: Event, layer: int, width: int) -> Tensor:
        """[num_heads, width] policy state of entries after the former event, 0 for later ones."""
        runs = self.policy_state.of_entries(event.pipeline, name, *_only(event.slot, layer))
        return runs.of_layer(0, self.pool).gathered(width)

    def _queries(self, plan: EventPlan, layer: int) -> Tensor:
        if not plan.window_size:
            pool = self.pool
            return pool.pages.new_zeros((0, pool.num_heads, pool.head_size))
        return self.windows.read(layer, plan.request_id, plan.position, plan.window_size)


def _only(slot: int, layer: int) -> tuple[slice, slice]:
    """One request and one layer."""
    return slice(slot, slot + 1), slice(layer, layer + 1)
