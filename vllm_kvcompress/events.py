"""Runs compression events: reads source pages, asks the policy, writes the survivors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_kvcompress.attention_loss import AttentionLoss
from vllm_kvcompress.compressor import compress_layer
from vllm_kvcompress.kernels.paged_shapes import paged_kernels
from vllm_kvcompress.ledger import EventPlan
from vllm_kvcompress.page_tables import PageTables
from vllm_kvcompress.paged_windows import PagedWindows
from vllm_kvcompress.pages import InterleavedPagePool
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import LayerView, Selection, SourcePages
from vllm_kvcompress.policies.rotary import Rotary
from vllm_kvcompress.policies.rounding import spread
from vllm_kvcompress.query_windows import QueryWindows
from vllm_kvcompress.stopwatch import Stopwatch
from vllm_kvcompress.transfers import upload


@dataclass(frozen=True)
class LayerWeights:
    """What value-aware policies need of one layer (None where the pipeline does not ask).

    Attributes:
        output_weight: [num_heads, head_size, group, hidden] o_proj by KV head and its group.
        output_gram: [num_query_heads, head_size, head_size] fp32 W W^T by query head.
        rotary: how keys are rotated.
    """

    output_weight: Tensor | None = None
    output_gram: Tensor | None = None
    rotary: Rotary | None = None


@dataclass
class Event:
    """One event of one request, while its step runs.

    Attributes:
        plan: what the scheduler decided.
        slot: the request's row in the page tables.
        pipeline: the request's policy.
        blocks: [end_block - first_block (+ 1 if a partial block follows)] int64 block ids.
        fresh_pages: [K * num_layers * num_heads] int64 pages that take the survivors.
        layer_pages: pages of each layer afterwards, the state's not counted.
        state_pages: pages of each layer for what the policy carries.
        layer_starts: where each layer's pages begin in `fresh_pages`.
        stopwatch: counts the time spent.
        max_kept: pages of the fullest head so far; off the CPU an upper bound.
        page_counts: [num_heads] int64 of every layer so far.
    """

    plan: EventPlan
    slot: int
    pipeline: Pipeline
    blocks: Tensor
    fresh_pages: Tensor
    layer_pages: list[int]
    stopwatch: Stopwatch
    state_pages: int = 0
    layer_starts: list[int] = field(default_factory=list)
    max_kept: int = 0
    page_counts: list[Tensor] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Time spent so far; None while a device still works."""
        return self.stopwatch.seconds


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


class EventRunner:
    """Compresses requests of one cache group, layer by layer, as the model runs.

    Attributes:
        pipelines: the policies of requests, by name.
        pipeline: the server's own. Where attention needs more than ordinary kernels give, it is
            the only one.
        loss: measures what later attention loses; None: nobody asked.
    """

    def __init__(
        self,
        tables: PageTables,
        windows: QueryWindows | PagedWindows,
        pipelines: Mapping[str, Pipeline],
        weights: Sequence[LayerWeights],
    ) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.windows = windows
        self.pipelines = pipelines
        self.pipeline = next(iter(pipelines.values()))
        self.weights = weights
        self.loss: AttentionLoss | None = None

    def begin(self, plan: EventPlan, block_row: Tensor) -> Event:
        """Sets an event up before the model runs.

        Args:
            plan: the event.
            block_row: [max_blocks] int32 the request's block ids by logical block.
        """
        pool, tables = self.pool, self.tables
        slot = tables.slots.get(plan.request_id)
        if slot is None:
            slot = tables.acquire(plan.request_id)
        former = tables.layer_pages.get(plan.request_id, [0] * pool.num_layers)
        num_kept = len(plan.fresh_block_ids)
        pipeline = self.pipelines[plan.policy]
        state_pages = pipeline.state_pages(
            num_kept * pool.num_heads,
            pool.num_heads,
            pool.head_size,
            pool.block_size,
            pool.page_bytes,
        )
        layer_pages = self._layer_pages(pipeline, plan, former, state_pages)
        partial = 1 if plan.position % pool.block_size else 0
        starts = [
            sum(layer_pages[:layer]) + layer * state_pages for layer in range(pool.num_layers)
        ]
        return Event(
            plan=plan,
            slot=slot,
            pipeline=pipeline,
            blocks=block_row[plan.first_block : plan.end_block + partial].to(torch.int64),
            fresh_pages=pool.fresh_pages(upload(list(plan.fresh_block_ids), pool.device)),
            layer_pages=layer_pages,
            stopwatch=Stopwatch(pool.device),
            state_pages=state_pages,
            layer_starts=starts,
        )

    def _layer_pages(
        self, pipeline: Pipeline, plan: EventPlan, former: list[int], reserved: int
    ) -> list[int]:
        """Pages for entries in each layer: the allocator's division, less those of the state."""
        pool = self.pool
        num_tail = plan.end_block - plan.first_block
        capacity = [pages + num_tail * pool.num_heads + reserved for pages in former]
        pages = pipeline.allocator.layer_pages(
            len(plan.fresh_block_ids), capacity, pool.num_heads, plan.end_block
        )
        least = pool.num_heads + reserved
        if reserved and min(pages) < least:
            shares = [float(count) for count in pages]
            pages = spread(shares, sum(pages), capacity, [least] * len(pages))
        return [count - reserved for count in pages]

    def run_layer(self, event: Event, layer: int, scale: float) -> None:
        """Compresses one layer; called after the layer's attention."""
        with event.stopwatch.running():
            sources = self._sources(event, layer)
            view = self._view(event, layer, scale, sources)
            total = event.layer_pages[layer]
            selection = compress_layer(event.pipeline, view, total)
            start = event.layer_starts[layer]
            pages = event.fresh_pages[start : start + total]
            self._write(event, view, sources, selection, pages)
            if event.state_pages:
                self._write_state(event, layer, selection)
            max_kept = self._max_kept(selection.page_counts, view, total)
            counts = selection.page_counts
            self.tables.replace(layer, event.slot, counts, pages, max_kept)
        event.page_counts.append(counts)
        event.max_kept = max(event.max_kept, max_kept)
        if self.loss is not None:
            values = self.pool.values(sources.body).flatten(1, 2)
            self.loss.compress(event.plan, layer, event.slot, view, values, selection)

    def finish(self, event: Event) -> None:
        """After the last layer: from now on the request's tail starts at the event."""
        plan = event.plan
        self.tables.layer_pages[plan.request_id] = event.layer_pages
        self.tables.begin_tail(event.slot, plan.end_block, event.max_kept)
        if plan.reusable:
            self.tables.save(event.slot, plan.request_id, plan.fresh_block_ids[0])
        self.windows.end_event(plan.request_id)

    def _sources(self, event: Event, layer: int) -> Sources:
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

    def _view(self, event: Event, layer: int, scale: float, sources: Sources) -> LayerView:
        """What the policy sees of the layer."""
        pool, plan = self.pool, event.plan
        counts = self.tables.counts[layer, event.slot].to(torch.int64)
        lengths = (counts + plan.end_block - plan.first_block) * pool.block_size
        num_entries = sources.num_body * pool.block_size
        weights = self.weights[layer]
        return LayerView(
            **self._entries(event, sources, lengths),
            lengths=lengths,
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
            accumulated=self._accumulated(event, layer, num_entries),
            rotary=weights.rotary,
        )

    def _entries(self, event: Event, sources: Sources, lengths: Tensor) -> dict[str, Any]:
        """A view's keys and values, and its pages: what `LayerView` calls these.

        Where kernels read pages, nothing is gathered yet.
        """
        pool, num_tail = self.pool, event.plan.position % self.pool.block_size
        readers: dict[str, Callable[[], Tensor]] = {
            "keys": lambda: pool.keys(sources.body).flatten(1, 2),
            "values": lambda: pool.values(sources.body).flatten(1, 2),
            "tail_keys": lambda: pool.keys(sources.partial).flatten(1, 2)[:, :num_tail],
            "tail_values": lambda: pool.values(sources.partial).flatten(1, 2)[:, :num_tail],
        }
        if isinstance(pool, InterleavedPagePool):
            body = pool.entries(sources.body, lengths)
            whole = pool.entries(sources.table, lengths + num_tail)
            return {**readers, "pages": SourcePages(body, whole, num_tail)}
        return readers

    def carried(self, pages: Tensor) -> Tensor:
        """[..., num_heads, s] fp32 numbers per head in state pages [..., state_pages].

        Of requests with the server's own policy.
        """
        return self._carried(self.pipeline, pages)

    def _carried(self, pipeline: Pipeline, pages: Tensor) -> Tensor:
        num_heads, size = self.pool.num_heads, pipeline.state_size(self.pool.head_size)
        numbers = self.pool.floats(pages)[..., : num_heads * size]
        return numbers.unflatten(-1, (num_heads, size))

    def entry_bias(self, layer: int, slots: Tensor, width: int) -> Tensor:
        """[R, num_heads, width] fp32 bias of the kept entries of requests, 0 behind them.

        Of requests with the server's own policy.
        """
        return self._carried_entries(self.pipeline, "bias", layer, slots, width)

    def _carried_entries(
        self, pipeline: Pipeline, name: str, layer: int, slots: Tensor | slice, width: int
    ) -> Tensor:
        """[R, num_heads, width] fp32 numbers of the kept entries of requests, 0 behind them.

        In a layer's state pages those of the entries follow the numbers per head: of every name
        in `Pipeline.carried_entries` all of them, head after head.
        """
        pool = self.pool
        which = pipeline.carried_entries.index(name)
        numbers = pool.floats(self.tables.state[layer, slots])
        counts = self.tables.counts[layer, slots].long() * pool.block_size
        first = counts.cumsum(dim=1) - counts
        first = first + pool.num_heads * pipeline.state_size(pool.head_size)
        first = first + which * counts.sum(dim=1, keepdim=True)
        nth = torch.arange(width, device=numbers.device)
        places = (first[..., None] + nth).clamp_max(numbers.shape[1] - 1)
        found = numbers.gather(1, places.flatten(1)).view(places.shape)
        return found.masked_fill(nth >= counts[..., None], 0)

    def _state(self, event: Event, layer: int) -> Tensor | None:
        """[num_heads, s] what the former event carried on, if there was one."""
        if not event.plan.resident_blocks or not event.pipeline.state_size(self.pool.head_size):
            return None
        return self._carried(event.pipeline, self.tables.state[layer, event.slot])

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

    def _accumulated(self, event: Event, layer: int, width: int) -> Tensor | None:
        """[num_heads, width] attention that former events have counted, if there were any."""
        if not event.plan.resident_blocks or not event.pipeline.needs.accumulated:
            return None
        return self._read_entries("accumulated", event, layer, width)

    def _read_entries(self, name: str, event: Event, layer: int, width: int) -> Tensor:
        """[num_heads, width] what the former event carried on of every entry, 0 for later ones."""
        slot = slice(event.slot, event.slot + 1)
        return self._carried_entries(event.pipeline, name, layer, slot, width)[0]

    def _write_state(self, event: Event, layer: int, selection: Selection) -> None:
        """Writes what the policy carries behind the layer's entries."""
        merged, pool = selection.merged, self.pool
        start = event.layer_starts[layer] + event.layer_pages[layer]
        pages = event.fresh_pages[start : start + event.state_pages]
        numbers = []
        if event.pipeline.state_size(pool.head_size):
            assert merged.state is not None
            numbers.append(merged.state.flatten())
        heads = self._heads(selection, event.layer_pages[layer])
        for name in event.pipeline.carried_entries:
            entries = getattr(merged, name)
            numbers.append(entries[heads, selection.kept_indices].float())
        pool.write_floats(pages, torch.cat(numbers).float())
        self.tables.replace_state(layer, event.slot, pages)

    def _queries(self, plan: EventPlan, layer: int) -> Tensor:
        if not plan.window_size:
            pool = self.pool
            return pool.pages.new_zeros((0, pool.num_heads, pool.head_size))
        return self.windows.read(layer, plan.request_id, plan.position, plan.window_size)

    def _write(
        self, event: Event, view: LayerView, sources: Sources, selection: Selection, pages: Tensor
    ) -> None:
        """Writes the survivors to fresh pages, head after head."""
        pool, merged = self.pool, selection.merged
        size, kept = pool.block_size, selection.kept_indices
        if view.pages is not None and merged.keys is None and merged.values is None:
            run = paged_kernels(view.pages.body)
            run.compact_pages(view.pages.body, selection.page_counts, kept, pages)
            return
        heads = self._heads(selection, pages.numel())
        keys = (view.keys if merged.keys is None else merged.keys)[heads, kept]
        if merged.values is not None:
            values = merged.values[heads, kept]
        elif event.pipeline.needs.any_values:
            values = view.values[heads, kept]
        else:
            values = pool.take_values(sources.body[heads, kept // size], kept % size)
        shape = (pages.numel(), size, pool.head_size)
        pool.write(pages, keys.view(shape), values.view(shape))

    def _heads(self, selection: Selection, num_pages: int) -> Tensor:
        """[num_pages * block_size] int64: whose each kept entry is."""
        heads = torch.repeat_interleave(selection.page_counts, output_size=num_pages)
        return heads.repeat_interleave(self.pool.block_size)

    def _max_kept(self, counts: Tensor, view: LayerView, total: int) -> int:
        """Pages of the fullest head; off the CPU a bound that needs no synchronisation."""
        if counts.device.type == "cpu":
            return int(counts.max())
        return min(total, view.num_entries // self.pool.block_size)
