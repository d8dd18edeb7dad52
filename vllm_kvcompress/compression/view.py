"""Views of a batch's layers, as policies see them: keys, values, queries and policy state.

H counts KV heads over all layers of the batch and, within a layer, over all of its requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.cache.page_norms import PageNorms
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedKV
from vllm_kvcompress.cache.policy_state import PolicyState
from vllm_kvcompress.cache.query_windows import Windows
from vllm_kvcompress.compression.batch import EventBatch
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.kernels.alibi import Alibi
from vllm_kvcompress.kernels.common.kv_view import KVView, PagedKV
from vllm_kvcompress.policies.base import EntryState, LayerView


@dataclass(frozen=True)
class Sources:
    """Pages that a batch reads.

    Attributes:
        table: [H, width] int64 page ids: each head's full pages, then its partial page if there
            is one; the rest of a row is arbitrary.
        num_body: columns that full pages may occupy.
        partial: [H, 0 or 1] int64 partial pages.
    """

    table: Tensor
    num_body: int
    partial: Tensor

    @property
    def body(self) -> Tensor:
        """Returns the [H, num_body] columns of full pages."""
        return self.table[:, : self.num_body]


class EventViews:
    """Builds the views of batches, from what earlier events left and the observed queries."""

    def __init__(
        self,
        policy_state: PolicyState,
        windows: Windows,
        weights: Sequence[LayerWeights],
        norms: PageNorms | None = None,
        sharing: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.sharing = sharing or {}
        self.policy_state = policy_state
        self.tables = policy_state.tables
        self.pool = policy_state.pool
        self.windows = windows
        self.weights = weights
        self.norms = norms

    def sources(self, batch: EventBatch, layers: range) -> Sources:
        """Returns the pages of the given layers that the batch reads."""
        pool = self.pool
        shape = (len(layers), len(batch.events), pool.num_heads)
        heads = torch.arange(pool.num_heads, device=pool.device)[:, None]
        offsets = pool.layer_offsets[layers.start : layers.stop].view(-1, 1, 1, 1)
        tail = batch.blocks[:, None] * pool.pages_per_block + heads
        tail = (tail + offsets).flatten(0, 2)
        partial = tail[:, :0]
        if batch.num_tail:
            where = batch.num_full.expand(shape).reshape(-1, 1)
            # Requests without a partial block get an arbitrary page.
            partial = tail.gather(1, where.clamp_max(tail.shape[1] - 1))
        if not batch.resident:
            return Sources(tail, batch.num_body, partial)
        # A row of the page table holds the kept pages, then those of the tail.
        width = batch.num_body + partial.shape[1]
        rows = self.tables.rows.read(batch.slots, width, _slice(layers))[..., :width]
        return Sources(rows.flatten(0, 2).to(torch.int64), batch.num_body, partial)

    def view(self, batch: EventBatch, layers: range, scale: float, sources: Sources) -> LayerView:
        """Returns the policy's view of layers whose observed queries the batch holds."""
        pool = self.pool
        counts = self.tables.counts[_slice(layers), batch.slots].to(torch.int64)
        lengths = ((counts + batch.num_full) * pool.block_size).flatten()
        num_entries = sources.num_body * pool.block_size
        first, roots = self.weights[layers.start], None
        if first.output_root is not None:
            roots = _joined([self.weights[layer].output_root for layer in layers])
        return LayerView(
            kv=self._kv(batch, layers, sources, lengths),
            queries=self._held(batch, lengths),
            scale=scale,
            layers=layers,
            block_size=pool.block_size,
            num_requests=len(batch.events) * len(layers),
            ends=tuple(event.plan.position for event in batch.events) * len(layers),
            output_weight=first.output_weight if len(layers) == 1 else None,
            output_root=roots,
            rotary=first.rotary,
            sinks=self._sinks(batch, layers),
            alibi=self._alibi(batch, layers),
            state=self._state(batch, layers),
            entries=EntryState(
                bias=self._entry_state("bias", batch, layers, num_entries),
                positions=self._positions(batch, layers, num_entries),
                accumulated=self._entry_state("accumulated", batch, layers, num_entries),
                running=self._entry_state("running", batch, layers, num_entries),
            ),
            protected=self._protected(batch, layers, lengths, num_entries),
            shared_spans=self._shared_spans(batch, layers),
        )

    def _kv(self, batch: EventBatch, layers: range, sources: Sources, lengths: Tensor) -> KVView:
        """Returns keys and values, which are gathered only when a policy reads them."""
        pool, num_tail, shorter = self.pool, batch.num_tail, None
        layer = layers.start  # its scales apply to quantised pages
        if batch.tails is not None:
            shape = (len(layers), len(batch.events), pool.num_heads)
            shorter = batch.tails.expand(shape).flatten()
        if isinstance(pool, InterleavedPagePool):
            all_lengths = lengths + (num_tail if shorter is None else shorter)
            entries = pool.read_entries(sources.table, all_lengths, layer)
            return PagedKV(lengths, num_tail, entries, sources.num_body, shorter)
        partial, norms = sources.partial, self.norms
        return PackedKV(lengths, num_tail, pool, layer, sources.body, partial, shorter, norms)

    def _sinks(self, batch: EventBatch, layers: range) -> Tensor | None:
        """Returns the [H, G] attention sinks, the same for every request; None: there are none."""
        of_layers = [self.weights[layer].sinks for layer in layers]
        repeated = [each.repeat(len(batch.events), 1) for each in of_layers if each is not None]
        return _joined(repeated) if repeated else None

    def _alibi(self, batch: EventBatch, layers: range) -> Alibi | None:
        """Returns the biases by distance of H heads, the same for every request and layer."""
        alibi = self.weights[layers.start].alibi
        if alibi is None:
            return None
        return replace(alibi, slopes=alibi.slopes.repeat(len(batch.events) * len(layers), 1))

    def _state(self, batch: EventBatch, layers: range) -> Tensor | None:
        """Returns the [H, s] policy state of heads after the previous event, if there was one."""
        if not batch.resident or not batch.pipeline.state_size(self.pool.head_size):
            return None
        runs = self.policy_state.head_numbers(batch.pipeline, batch.slots, _slice(layers))
        size = batch.pipeline.state_size(self.pool.head_size)
        return runs.all_layers().whole(size)

    def _positions(self, batch: EventBatch, layers: range, width: int) -> Tensor | None:
        """Returns the [H, width] int64 positions of the entries that an event reads."""
        if not batch.pipeline.reads_positions:
            return None
        columns = torch.arange(width, device=self.pool.device)
        kept = self._entry_state("positions", batch, layers, width)
        if kept is None:
            num_rows = len(layers) * len(batch.events) * self.pool.num_heads
            return columns.expand(num_rows, -1)
        counts = self.tables.counts[_slice(layers), batch.slots].long() * self.pool.block_size
        counts, first = counts.view(-1, 1), (batch.first_tokens - counts).view(-1, 1)
        return torch.where(columns < counts, kept.long(), first + columns)

    def _protected(
        self, batch: EventBatch, layers: range, lengths: Tensor, width: int
    ) -> Tensor | None:
        """Returns the [H, width] bool entries that requests protect, if any request does.

        Of the kept entries of a head these are the first; the tail's follow from their positions.
        """
        if batch.protected is None or not batch.pipeline.keeps_spans_whole:
            return None
        size, device = self.pool.block_size, self.pool.device
        counts = self.tables.counts[_slice(layers), batch.slots].long()[..., None] * size
        columns = torch.arange(width, device=device)
        positions = (columns - counts + batch.first_tokens[:, None])[..., None]
        starts, ends = batch.protected[:, None, None].unbind(dim=-1)
        in_tail = ((positions >= starts[..., 1:]) & (positions < ends[..., 1:])).any(dim=-1)
        is_protected = torch.where(columns < counts, columns < ends[..., 0], in_tail)
        return is_protected.flatten(0, 2) & (columns < lengths[:, None])

    def _shared_spans(self, batch: EventBatch, layers: range) -> Tensor | None:
        """Returns the [R, 1 + spans, 2] bounds of spans of which heads keep a part, if any."""
        if batch.protected is None or batch.pipeline.keeps_spans_whole:
            return None
        return batch.protected.repeat(len(layers), 1, 1)

    def _entry_state(
        self, name: str, batch: EventBatch, layers: range, width: int
    ) -> Tensor | None:
        """Returns the [H, width] numbers that earlier events left, if any; newer entries have 0."""
        if not batch.resident or name not in batch.pipeline.token_state:
            return None
        runs = self.policy_state.entry_numbers(batch.pipeline, name, batch.slots, _slice(layers))
        return runs.all_layers().gathered(width)

    def _held(self, batch: EventBatch, lengths: Tensor) -> Tensor:
        """Returns the [window, H * G, D] observed queries of all layers of the batch."""
        if not batch.window_size:
            pool = self.pool
            return pool.pages.new_zeros((0, len(lengths), pool.head_size), dtype=pool.dtype)
        return _joined(batch.held_queries, dim=1)

    def queries(self, batch: EventBatch, layer: int) -> Tensor:
        """Returns a copy of the [window, heads * G, D] observed queries of a layer.

        The group of a KV head includes the query heads of layers that read this one's cache.
        """
        if batch.queries_at is None:
            plans = [event.plan for event in batch.events]
            ends = [(plan.request_id, plan.position) for plan in plans]
            batch.queries_at = self.windows.find(ends, batch.window_size)
        numbers = (layer, *self.sharing.get(layer, ()))
        queries = [self.windows.read(number, batch.queries_at) for number in numbers]
        if len(queries) == 1:
            return queries[0].flatten(1, 2)
        groups = [each.unflatten(2, (self.pool.num_heads, -1)) for each in queries]
        return torch.cat(groups, dim=3).flatten(1, 3)


def _slice(layers: range) -> slice:
    return slice(layers.start, layers.stop)


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
