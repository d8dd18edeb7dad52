"""Runs compression events: reads source pages, asks the policy, writes the survivors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_kvcompress.attention_loss import AttentionLoss
from vllm_kvcompress.compressor import compress_layer
from vllm_kvcompress.ledger import EventPlan
from vllm_kvcompress.page_tables import PageTables
from vllm_kvcompress.paged_windows import PagedWindows
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.policies.rotary import Rotary
from vllm_kvcompress.policies.rounding import spread
from vllm_kvcompress.query_windows import QueryWindows


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
        seconds: time spent so far.
        max_kept: pages of the fullest head so far.
        page_counts: [num_heads] int64 of every layer so far.
    """

    plan: EventPlan
    slot: int
    pipeline: Pipeline
    blocks: Tensor
    fresh_pages: Tensor
    layer_pages: list[int]
    state_pages: int = 0
    layer_starts: list[int] = field(default_factory=list)
    seconds: float = 0.0
    max_kept: int = 0
    page_counts: list[Tensor] = field(default_factory=list)


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
            fresh_pages=pool.fresh_pages(torch.tensor(plan.fresh_block_ids)),
            layer_pages=layer_pages,
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
        started = time.perf_counter()
        sources, view = self._view(event, layer, scale)
        total = event.layer_pages[layer]
        selection = compress_layer(event.pipeline, view, total)
        start = event.layer_starts[layer]
        pages = event.fresh_pages[start : start + total]
        self._write(view, sources, selection, pages)
        if event.state_pages:
            self._write_state(event, layer, selection)
        event.seconds += time.perf_counter() - started
        if self.loss is not None:
            values = self.pool.values(sources).flatten(1, 2)
            self.loss.compress(event.plan, layer, event.slot, view, values, selection)
        started = time.perf_counter()
        self.tables.replace(layer, event.slot, selection.page_counts, pages)
        event.page_counts.append(selection.page_counts)
        event.max_kept = max(event.max_kept, self._max_kept(selection.page_counts, view, total))
        event.seconds += time.perf_counter() - started

    def finish(self, event: Event) -> None:
        """After the last layer: from now on the request's tail starts at the event."""
        plan = event.plan
        self.tables.layer_pages[plan.request_id] = event.layer_pages
        self.tables.begin_tail(event.slot, plan.end_block, event.max_kept)
        if plan.reusable:
            self.tables.save(event.slot, plan.request_id, plan.fresh_block_ids[0])
        self.windows.end_event(plan.request_id)

    def _view(self, event: Event, layer: int, scale: float) -> tuple[Tensor, LayerView]:
        """The layer's source pages [num_heads, pages] and what the policy sees of them."""
        pool, plan = self.pool, event.plan
        offset = pool.layer_offsets[layer] + torch.arange(pool.num_heads)
        tail = event.blocks * pool.pages_per_block + offset[:, None]
        num_tail = plan.end_block - plan.first_block
        counts = self.tables.counts[layer, event.slot].to(torch.int64)
        sources = tail[:, :num_tail]
        if plan.resident_blocks:
            # The row holds the kept pages and, behind them, the tail's.
            width = int(self.tables.tails.max_kept[event.slot]) + num_tail
            sources = self.tables.table[layer, event.slot, :, :width].to(torch.int64)
        num_partial = plan.position % pool.block_size
        weights = self.weights[layer]
        needs_values = event.pipeline.needs.any_values
        keys = pool.keys(sources).flatten(1, 2)
        tail_keys = pool.keys(tail[:, num_tail:]).flatten(1, 2)[:, :num_partial]
        return sources, LayerView(
            keys=keys,
            values=pool.values(sources).flatten(1, 2) if needs_values else keys[:, :0],
            lengths=(counts + num_tail) * pool.block_size,
            tail_keys=tail_keys,
            tail_values=pool.values(tail[:, num_tail:]).flatten(1, 2)[:, :num_partial]
            if needs_values
            else tail_keys[:, :0],
            queries=self._queries(plan, layer, keys),
            scale=scale,
            layer=layer,
            num_layers=pool.num_layers,
            block_size=pool.block_size,
            output_weight=weights.output_weight,
            output_gram=weights.output_gram,
            state=self._state(event, layer),
            bias=self._bias(event, layer, keys.shape[1]),
            positions=self._positions(event, layer, keys.shape[1]),
            accumulated=self._accumulated(event, layer, keys.shape[1]),
            rotary=weights.rotary,
        )

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
        self, pipeline: Pipeline, name: str, layer: int, slots: Tensor, width: int
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
        nth = torch.arange(width)
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
        slots = torch.tensor([event.slot])
        return self._carried_entries(event.pipeline, name, layer, slots, width)[0]

    def _write_state(self, event: Event, layer: int, selection: Selection) -> None:
        """Writes what the policy carries behind the layer's entries."""
        merged, pool = selection.merged, self.pool
        start = event.layer_starts[layer] + event.layer_pages[layer]
        pages = event.fresh_pages[start : start + event.state_pages]
        numbers = []
        if event.pipeline.state_size(pool.head_size):
            assert merged.state is not None
            numbers.append(merged.state.flatten())
        total = event.layer_pages[layer]
        heads = torch.repeat_interleave(selection.page_counts, output_size=total)
        heads = heads.repeat_interleave(pool.block_size)
        for name in event.pipeline.carried_entries:
            entries = getattr(merged, name)
            numbers.append(entries[heads, selection.kept_indices].float())
        pool.write_floats(pages, torch.cat(numbers).float())
        self.tables.replace_state(layer, event.slot, pages)

    def _queries(self, plan: EventPlan, layer: int, keys: Tensor) -> Tensor:
        if not plan.window_size:
            return keys.new_zeros((0, self.pool.num_heads, self.pool.head_size))
        return self.windows.read(layer, plan.request_id, plan.position, plan.window_size)

    def _write(self, view: LayerView, sources: Tensor, selection: Selection, pages: Tensor) -> None:
        """Gathers the survivors and writes them to fresh pages, head after head."""
        pool, merged = self.pool, selection.merged
        size, kept = pool.block_size, selection.kept_indices
        total = pages.numel()
        heads = torch.repeat_interleave(selection.page_counts, output_size=total)
        heads = heads.repeat_interleave(size)
        keys = (view.keys if merged.keys is None else merged.keys)[heads, kept]
        if view.values.shape[1]:
            values = (view.values if merged.values is None else merged.values)[heads, kept]
        else:
            values = pool.take_values(sources[heads, kept // size], kept % size)
        shape = (total, size, pool.head_size)
        pool.write(pages, keys.view(shape), values.view(shape))

    def _max_kept(self, counts: Tensor, view: LayerView, total: int) -> int:
        """Pages of the fullest head; off the CPU a bound that needs no synchronisation."""
        if counts.device.type == "cpu":
            return int(counts.max())
        return min(total, int(view.keys.shape[1]) // self.pool.block_size)
