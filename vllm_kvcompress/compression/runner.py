"""Runs compression events: reads source pages, asks the policy, writes the kept tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, sub

import torch
from torch import Tensor

from vllm_kvcompress.cache.page_norms import PageNorms
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import KEYS, InterleavedPagePool
from vllm_kvcompress.cache.policy_state import PolicyState, StateNumbers
from vllm_kvcompress.cache.quantization import LayerScaled
from vllm_kvcompress.cache.query_windows import Windows
from vllm_kvcompress.compression.batch import (
    MAX_BATCH_TOKENS,
    MAX_HELD_WINDOWS,
    EventBatch,
    EventLayers,
    group_events,
    layers_per_batch,
    max_batch_tokens,
)
from vllm_kvcompress.compression.event import Event, LayerWeights, num_protected
from vllm_kvcompress.compression.holes import fill_holes
from vllm_kvcompress.compression.layer import compress_batch
from vllm_kvcompress.compression.observer import EventObserver
from vllm_kvcompress.compression.repetitions import Repetitions
from vllm_kvcompress.compression.stopwatch import Stopwatch, running
from vllm_kvcompress.compression.view import EventViews, Sources
from vllm_kvcompress.kernels.alibi import Alibi
from vllm_kvcompress.kernels.common.transfers import Download, upload
from vllm_kvcompress.kernels.compaction import compact_pages
from vllm_kvcompress.kernels.dispatch import reads_sizes
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.policies.parts.allocation import Allocator, spread
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import EventPlan


class EventRunner:
    """Compresses the requests of one cache group, a layer or a few at a time, as the model runs.

    Attributes:
        pipelines: policies that requests may use, by name.
        policy_state: state that policies keep for requests beside their tokens.
        repetitions: scores of requests that prepare contexts.
        norms: norms of values that events have computed; None where no policy reads them, and on
            GPUs, which compute them faster than they have memory for them.
        observer: a measuring tool; None while requests are served.
        max_tokens: padded tokens of a batch.
        sharing: by number of a layer whose cache others read, the numbers of their ring buffers.
        layers_alike: whether layers share the softmax scale, the rotation of keys and the cache's
            scales, so that a batch may hold several.
    """

    def __init__(
        self,
        tables: PageTables,
        windows: Windows,
        pipelines: Mapping[str, Pipeline],
        weights: Sequence[LayerWeights],
        max_tokens: int = MAX_BATCH_TOKENS,
        layers_alike: bool = True,
        sharing: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.max_tokens = min(max_tokens, max_batch_tokens(tables.pool))
        self.layers_alike = layers_alike and not isinstance(tables.pool.quantization, LayerScaled)
        self.tables = tables
        self.pool = tables.pool
        self.windows = windows
        self.pipelines = pipelines
        self.weights = list(weights)
        self.observer: EventObserver | None = None
        self.policy_state = PolicyState(tables)
        self.repetitions = Repetitions(self.pool, self.sinks)
        self.norms: PageNorms | None = None
        reads_norms = any(pipeline.needs.output_root for pipeline in pipelines.values())
        if reads_norms and self.pool.device.type == "cpu":
            self.norms = PageNorms(len(self.pool.pages), self.pool.block_size)
        self._views = EventViews(self.policy_state, windows, self.weights, self.norms, sharing)

    @property
    def pipeline(self) -> Pipeline:
        """The server's own policy; where attention needs biases or corrections, the only one."""
        return next(iter(self.pipelines.values()))

    def sinks(self, layer: int) -> Tensor | None:
        """Returns the [num_heads, group] attention sinks of a layer, if it has any."""
        return self.weights[layer].sinks

    def alibi(self, layer: int) -> Alibi | None:
        """Returns the biases by distance of a layer's attention, if it has any."""
        return self.weights[layer].alibi

    def begin(
        self, plan: EventPlan, block_row: Tensor, allocator: Allocator | None = None
    ) -> Event:
        """Prepares an event before the model runs.

        `block_row` holds the request's [max_blocks] int32 block ids by logical block; an
        `allocator` divides pages among layers in the place of the policy's.
        """
        pool, tables = self.pool, self.tables
        slot = tables.slots.get(plan.request_id)
        if slot is None:
            slot = tables.acquire(plan.request_id)
        pages_before = tables.layer_pages.get(plan.request_id, [0] * pool.num_layers)
        num_kept = plan.num_kept_blocks
        pipeline = self.pipelines[plan.policy]
        if plan.prepares:
            pipeline = self.repetitions.pipeline(plan.request_id, pipeline)
        if plan.in_place:  # each layer in its own pages, since the others are still to be read
            per_layer = num_kept * pool.num_heads
            state_of_layer = pipeline.state_pages(per_layer, pool.page_shape)
            layer_pages, state_pages = pages_before, [state_of_layer] * pool.num_layers
            fresh_pages = tables.kept_pages(slot, per_layer * pool.num_layers, state_of_layer)
        else:
            layer_pages, state_pages = self._layer_pages(
                pipeline, allocator or pipeline.allocator, plan, pages_before
            )
            fresh_pages = self._fresh_pages(plan)
        if any(state_pages):
            self.policy_state.blocks.update((*plan.fresh_block_ids, *plan.beside_tail))
        num_tail = plan.num_partial_tokens(pool.block_size)
        partial = 1 if num_tail else 0
        num_before = int(tables.tails.max_kept[slot]) if plan.resident_blocks else 0
        return Event(
            plan=plan,
            slot=slot,
            pipeline=pipeline,
            blocks=block_row[plan.first_block : plan.end_block + partial].to(torch.int64),
            fresh_pages=fresh_pages,
            layer_pages=layer_pages,
            stopwatch=Stopwatch(pool.device),
            num_body=num_before + plan.end_block - plan.first_block,
            num_tail=num_tail,
            state_pages=state_pages,
            layer_starts=[0, *accumulate(map(add, layer_pages, state_pages))][:-1],
        )

    def _fresh_pages(self, plan: EventPlan) -> Tensor:
        """Returns the [P] int64 pages that take what an event keeps and its state, layer by layer.

        In the blocks beside the tail, which other layers are still to read, each layer has its own.
        """
        pool = self.pool
        pages = pool.fresh_pages(upload(list(plan.fresh_block_ids), pool.device))
        if not plan.beside_tail:
            return pages
        blocks = upload(list(plan.beside_tail), pool.device)
        beside = [pool.layer_page_ids(layer, blocks).flatten() for layer in range(pool.num_layers)]
        return torch.cat((torch.stack(beside), pages.view(pool.num_layers, -1)), dim=1).flatten()

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Forgets the norms of values in blocks that are written to."""
        if self.norms is not None and (blocks := list(block_ids)):
            self.norms.forget(self.pool.fresh_pages(upload(blocks, self.pool.device)))

    def _layer_pages(
        self,
        pipeline: Pipeline,
        allocator: Allocator,
        plan: EventPlan,
        pages_before: list[int],
    ) -> tuple[list[int], list[int]]:
        """Returns the pages for tokens, and those for policy state, of each layer.

        The allocator divides both together; a layer with more tokens has more state. Each layer has
        room for the tokens that every head keeps.
        """
        pool, shape = self.pool, self.pool.page_shape
        num_tail_blocks = plan.end_block - plan.first_block
        held = [pages + num_tail_blocks * pool.num_heads for pages in pages_before]
        capacity = [pages + pipeline.state_pages(pages, shape) for pages in held]
        pages = allocator.layer_pages(
            plan.num_kept_blocks, capacity, pool.num_heads, plan.end_block
        )
        num_kept = num_protected(pipeline, plan, pool.block_size)
        fewest = max(1, ceil_div(num_kept, pool.block_size)) * pool.num_heads
        reserved = pipeline.state_pages(fewest, shape)
        least = fewest + pipeline.state_pages(fewest + reserved, shape)
        if (num_kept or reserved) and min(pages) < least:
            shares = [float(count) for count in pages]
            pages = spread(shares, sum(pages), capacity, [least] * len(pages))
        state = [pipeline.state_pages(count, shape) for count in pages]
        return list(map(sub, pages, state)), state

    def batches(
        self, events: Sequence[Event], windows_in_step: Iterable[str] = ()
    ) -> list[EventBatch]:
        """Returns the batches of a step; with an observer each is one event in one layer.

        `windows_in_step` names requests whose whole window is among the step's queries, where only
        one layer's are at hand; those of others lie in ring buffers until the event ends.
        """
        max_tokens = self.max_tokens if self.observer is None else 0
        in_step, batches = set(windows_in_step), []
        left = sum(event.plan.request_id in in_step for event in events)
        room = MAX_HELD_WINDOWS  # that those left share
        for group in group_events(events, in_step, max_tokens):
            num_events, longest, num_layers = len(group), group[-1], 1
            if self.observer is None:
                num_layers = self.layers_at_once(longest.pipeline, longest.num_tokens, num_events)
            holds = longest.plan.request_id in in_step
            if longest.plan.window_size:
                most = room // left if holds else MAX_HELD_WINDOWS // num_events
                num_layers = max(1, min(num_layers, most))
            if holds:
                room, left = room - num_layers * num_events, left - num_events
            batches.append(EventBatch.of(group, self.pool, num_layers, holds))
        return batches

    def layers_at_once(self, pipeline: Pipeline, num_tokens: int, num_events: int = 1) -> int:
        """Returns in how many layers at once a batch of events of `num_tokens` tokens runs."""
        if not self.layers_alike:
            return 1
        most = layers_per_batch(pipeline, num_tokens, num_events, self.max_tokens)
        return min(self.pool.num_layers, most)

    def run_layer(
        self, batch: EventBatch, layer: int, scale: float, queries: Tensor | None = None
    ) -> None:
        """Compresses a layer after its attention, with earlier layers that wait for it.

        Callers go through all layers of the group in order. The batch observes the [window,
        num_query_heads, head_size] `queries`; None: the recorded ones.
        """
        run = batch.layers[layer]
        with running([event.stopwatch for event in batch.events]):
            if queries is not None or (batch.window_size and batch.holds):
                held = self._views.queries(batch, layer) if queries is None else queries
                batch.held_queries.append(held)
            if layer != run.layers[-1]:
                return
            if batch.window_size and not batch.held_queries:
                batch.held_queries += [self._views.queries(batch, each) for each in run.layers]
            sources = self._views.sources(batch, run.layers)
            view = self._views.view(batch, run.layers, scale, sources)
            selection = compress_batch(batch.pipeline, view, run.totals)
            self._keep(batch, run, view, sources, selection)
            batch.held_queries.clear()

    def _keep(
        self,
        batch: EventBatch,
        run: EventLayers,
        view: LayerView,
        sources: Sources,
        selection: Selection,
    ) -> None:
        """Writes the kept tokens and policy state, and enters their pages into the page tables.

        An event that overwrites pages reads all that it needs, which fails where a policy returned
        something of a wrong shape, before it writes anything: only then can the guard run the layer
        again.
        """
        pool, merged, pages, places = self.pool, selection.merged, run.pages, None
        any_order = batch.pipeline.any_order and batch.protected is None
        if batch.in_place and any_order and reads_sizes(pool.device):
            held = self.tables.counts[run.layers.start : run.layers.stop, batch.slots]
            selection, pages, places = fill_holes(
                selection, sources.body, held.flatten(), pool.block_size
            )
        compacts = not (batch.overwrites or merged.keys is not None or merged.values is not None)
        entries = None
        if isinstance(pool, InterleavedPagePool) and compacts:
            entries = pool.entries(sources.body, view.lengths)
        rows = [] if entries else self._kept_rows(view, sources, selection, places)
        if self.observer is not None:
            values = pool.values(sources.body, run.layers.start).flatten(1, 2)
            self.observer.compressed(batch.events[0], run.layers.start, view, values, selection)
        if run.state.width:
            self.policy_state.write(
                batch.pipeline,
                run.layers.start,
                selection,
                run.state_pages,
                run.state,
                run.totals.pages,
            )
        if self.norms is not None:
            self.norms.forget(pages)
        if entries is not None:
            compact_pages(entries, selection.page_counts, selection.kept_indices, pages)
        elif places is None:
            shape = (len(pages), pool.block_size, pool.row_size)
            pool.write(pages, *(each.view(shape) for each in rows))
        else:
            targets, tokens = pages[places // pool.block_size], places % pool.block_size
            for which, moved in zip(pool.stored, rows, strict=True):
                pool.put(targets, tokens, which, moved)
        self._replace(batch, run, view, selection.page_counts, pages)

    def _replace(
        self,
        batch: EventBatch,
        run: EventLayers,
        view: LayerView,
        page_counts: Tensor,
        pages: Tensor,
    ) -> None:
        """Enters the kept pages into the page tables; `page_counts` is [H] pages of each head."""
        layers, num_events = run.layers, len(batch.events)
        counts = view.by_request(page_counts).unflatten(0, (len(layers), num_events))
        bounds = self._max_kept(batch, layers, counts)
        for event, bound in zip(batch.events, bounds, strict=True):
            self.tables.rows.reserve(event.slot, bound)
        slots = batch.slots if num_events > 1 else batch.events[0].slot
        self.tables.replace(layers, slots, page_counts, pages, max(bounds))
        by_event = zip(batch.events, counts.unbind(dim=1), bounds, strict=True)
        for event, event_counts, bound in by_event:
            event.page_counts += event_counts.unbind()
            event.max_kept = max(event.max_kept, bound)

    def finish(self, event: Event) -> None:
        """Ends an event after the last layer: the request's tail now starts at its position."""
        plan = event.plan
        self.tables.layer_pages[plan.request_id] = event.layer_pages
        longest_head = None
        if self.pool.device.type != "cpu":
            longest_head = Download(torch.stack(event.page_counts).max())
        self.tables.begin_tail(event.slot, plan.end_block, event.max_kept, longest_head)
        if plan.kept_as is not None:
            self.tables.save(plan.request_id, plan.kept_as)
        self.windows.end_event(plan.request_id)

    def read_by_attention(self, slots: Tensor) -> StateNumbers | None:
        """Returns the policy state that attention reads for requests in [R] `slots`, if any.

        It corrects outputs (MomentKV), or holds the biases or positions of kept entries.
        """
        if self.pipeline.attends_by_position:
            return self.policy_state.entry_numbers(self.pipeline, "positions", slots)
        if self.pipeline.corrects:
            return self.policy_state.head_numbers(self.pipeline, slots)
        if self.pipeline.weighs_entries:
            return self.policy_state.entry_numbers(self.pipeline, "bias", slots)
        return None

    def _kept_rows(
        self, view: LayerView, sources: Sources, selection: Selection, places: Tensor | None
    ) -> list[Tensor]:
        """Copies the [n, row_size] keys and values (where pages store both), as stored, of all kept
        tokens or [n] `places` of them."""
        pool, merged = self.pool, selection.merged
        size, kept = pool.block_size, selection.kept_indices
        heads = selection.heads(size)
        if places is not None:
            heads, kept = heads[places], kept[places]
        copies = []
        for which in pool.stored:
            rows = merged.keys if which == KEYS else merged.values
            if rows is None and pool.quantization is None:
                rows = view.kv.gathered(which)
            if rows is None:
                copy = pool.take(sources.body[heads, kept // size], kept % size, which)
            else:
                copy = rows.flatten(0, 1).index_select(0, heads * rows.shape[1] + kept)
            copies.append(copy)
        return copies

    def _max_kept(self, batch: EventBatch, layers: range, counts: Tensor) -> list[int]:
        """Returns the pages of each request's longest head, from [layers, R, num_heads] counts.

        On accelerators these are upper bounds, which need no synchronisation.
        """
        if counts.device.type == "cpu":
            longest: list[int] = counts.amax(dim=(0, 2)).tolist()
            return longest
        return [
            min(max(event.layer_pages[layers.start : layers.stop]), event.num_body)
            for event in batch.events
        ]
