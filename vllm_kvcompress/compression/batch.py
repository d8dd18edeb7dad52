"""Batches of events: several requests in one layer, or one request in several layers.

    several requests    [ request 0: head 0, head 1, .. ][ request 1: head 0, .. ] ..
    several layers      [ layer 0: head 0, head 1, .. ][ layer 1: head 0, .. ] ..

The event of a short prompt is little work in many operators, so a batch costs hardly more than one
event. Each request keeps its own budget, lengths and pages. A batch of layers runs when its last
layer has been computed; queries of this step are held until then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.policy_state import StatePagePlaces
from vllm_kvcompress.cache.query_windows import WindowRows
from vllm_kvcompress.compression.event import Event, num_protected
from vllm_kvcompress.compression.layer import Totals, protected_pages
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import num_in_spans

MAX_PADDING = 1.25  # longest event of a batch over its shortest
# Padded tokens of a batch. The host of an H100 took 11 us to queue an operator, whatever its size.
MAX_BATCH_TOKENS = 65_536
# Key bytes of a batch on CPUs, where operators gather keys: one large tensor is slower than several
# small ones (twice as slow for `keydiff` on layers of Llama-3.1-8B's shape, 16 MiB).
MAX_BATCH_BYTES = 8 * 2**20
MAX_BATCH_LAYERS = 16  # more layers save little
MAX_HELD_WINDOWS = 32  # windows, one per layer and event, whose queries are copied at a time
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class EventLayers:
    """Consecutive layers that a batch compresses at once, after the last of them is computed.

    Attributes:
        layers: layer numbers.
        totals: pages to keep, for each request or, in a batch of layers, for each layer.
        pages: [P] int64 fresh pages for the kept tokens.
        state_pages: [S] int64 fresh pages for the policy states.
        state: which requests own `state_pages`.
    """

    layers: range
    totals: Totals
    pages: Tensor
    state_pages: Tensor
    state: StatePagePlaces


@dataclass
class EventBatch:
    """R events with one policy, one window size and similar lengths, while their step runs.

    Attributes:
        events: one for each request.
        pipeline: their policy.
        slots: [R] int64 rows of the requests in the page tables.
        blocks: [R, n] int64 block ids of the full blocks, then of the partial one.
        num_full: [R, 1] int64 full blocks of each tail.
        first_tokens: [R, 1] int64 logical tokens before each tail.
        num_body: page-table columns that full pages may occupy.
        num_tail: tokens of the longest partial block.
        tails: [R, 1] int64 tokens of each partial block where they differ; else None.
        protected: [R, 1 + spans, 2] int64 bounds of what requests protect: of entries that earlier
            events kept of it, then of logical tokens; padded with empty spans. Where spans keep a
            share, the first are the bounds of all tokens that the event reads. None: nothing is.
        layers: for each layer, the layers that it is compressed with.
        holds: whether queries are gone after their layer, so that they are held.
        queries_at: places of the observed queries, once they are looked up.
        held_queries: observed queries of the layers that are compressed next, oldest first.
    """

    events: list[Event]
    pipeline: Pipeline
    slots: Tensor
    blocks: Tensor
    num_full: Tensor
    first_tokens: Tensor
    num_body: int
    num_tail: int
    tails: Tensor | None
    protected: Tensor | None
    layers: list[EventLayers]
    holds: bool = True
    queries_at: WindowRows | None = field(default=None, init=False)
    held_queries: list[Tensor] = field(default_factory=list, init=False)

    @property
    def window_size(self) -> int:
        """Number of queries that each event observes."""
        return self.events[0].plan.window_size

    @property
    def resident(self) -> bool:
        """Whether the events read tokens that earlier events kept."""
        return self.events[0].plan.resident_blocks > 0

    @property
    def in_place(self) -> bool:
        """Whether kept tokens stay in the pages of the former events' kept ones."""
        return self.events[0].plan.in_place

    @property
    def overwrites(self) -> bool:
        """Whether kept tokens are written to pages that the batch reads."""
        return self.events[0].plan.overwrites

    @classmethod
    def of(
        cls, events: list[Event], pool: PagePool, num_layers: int = 1, holds: bool = True
    ) -> EventBatch:
        """Builds the batch of a group of `group_events`, in `num_layers` layers at once."""
        first, device = events[0], pool.device
        numbers = [
            (event.slot, event.num_full, event.plan.first_block * pool.block_size, event.num_tail)
            for event in events
        ]
        slots, num_full, first_tokens, tails = upload(np.array(numbers).T.copy(), device)
        blocks = first.blocks[None]
        if len(events) > 1:
            blocks = pad_sequence([event.blocks for event in events], batch_first=True)
        return cls(
            events=events,
            pipeline=first.pipeline,
            slots=slots,
            blocks=blocks,
            num_full=num_full[:, None],
            first_tokens=first_tokens[:, None],
            num_body=max(event.num_body for event in events),
            num_tail=max(event.num_tail for event in events),
            tails=tails[:, None] if len({event.num_tail for event in events}) > 1 else None,
            protected=_protected(events, pool),
            layers=list(_layers(events, pool, num_layers)),
            holds=holds,
        )


def max_batch_tokens(pool: PagePool) -> int:
    """Returns how many padded tokens a batch may have on the pool's device."""
    if pool.device.type != "cpu":
        return MAX_BATCH_TOKENS
    token_bytes: int = pool.num_heads * pool.head_size * pool.dtype.itemsize
    return min(MAX_BATCH_TOKENS, MAX_BATCH_BYTES // token_bytes)


def layers_per_batch(pipeline: Pipeline, num_tokens: int, num_events: int, max_tokens: int) -> int:
    """Returns in how many layers at once `num_events` events of `num_tokens` tokens may run.

    It is 1 for policies that do not declare `batches`, and where mergers or weights of the output
    projection would multiply memory by the number of layers.
    """
    if not pipeline.batches or pipeline.merger is not None or pipeline.needs.output_weight:
        return 1
    return max(1, min(MAX_BATCH_LAYERS, max_tokens // max(1, num_tokens * num_events)))


def group_events(
    events: Iterable[Event], windows_in_step: Iterable[str], max_tokens: int
) -> list[list[Event]]:
    """Groups a step's events of one cache group into batches of at most `max_tokens` padded tokens.

    `windows_in_step` names requests whose whole window is among the step's queries.
    """
    in_step = set(windows_in_step)

    def kind(event: Event) -> Hashable:
        plan = event.plan
        if event.error is not None or not event.pipeline.batches:
            return plan.request_id
        kept_before = plan.resident_blocks > 0, plan.in_place, plan.overwrites
        return id(event.pipeline), plan.window_size, kept_before, plan.request_id in in_step

    alike: dict[Hashable, list[Event]] = {}
    for event in events:
        alike.setdefault(kind(event), []).append(event)
    batches: list[list[Event]] = []
    for candidates in alike.values():
        batch: list[Event] = []
        for event in sorted(candidates, key=lambda event: event.num_tokens):
            length = event.num_tokens
            fits = batch and length <= MAX_PADDING * batch[0].num_tokens
            if not fits or length * (len(batch) + 1) > max_tokens:
                batch = []
                batches.append(batch)
            batch.append(event)
    return batches


def _layers(events: list[Event], pool: PagePool, num_together: int) -> Iterator[EventLayers]:
    """Yields for each layer the layers that it is compressed with."""
    number = ceil_div(pool.num_layers, num_together)
    firsts = [run * pool.num_layers // number for run in range(number + 1)]
    runs = [range(*ends) for ends in pairwise(firsts)]
    pages = _pages(events, runs, pool)
    totals = _totals(events, runs, pool)
    states: dict[tuple[tuple[int, int, int], ...], StatePagePlaces] = {}
    start = 0
    for layers, total in zip(runs, totals, strict=True):
        rows = tuple(
            (layer - layers.start, event.slot, event.state_pages[layer])
            for layer in layers
            for event in events
        )
        if rows not in states:
            states[rows] = StatePagePlaces.of(rows, pool)
        state = states[rows]
        end = start + total.num_pages
        state_pages = pages[end : end + state.num_pages]
        yield from [EventLayers(layers, total, pages[start:end], state_pages, state)] * len(layers)
        start = end + state.num_pages


def _pages(events: list[Event], runs: list[range], pool: PagePool) -> Tensor:
    """Returns the [n] int64 fresh pages of all events: run by run of layers, first the pages for
    tokens, then those for policy states."""
    pages = events[0].fresh_pages
    if len(events) > 1:
        pages = torch.cat([event.fresh_pages for event in events])
    elif len(runs) == pool.num_layers or not any(events[0].state_pages):
        return pages  # already in this order
    ends = np.cumsum([event.fresh_pages.numel() for event in events])
    firsts = [int(end) - event.fresh_pages.numel() for end, event in zip(ends, events, strict=True)]
    placed = list(zip(firsts, events, strict=True))
    parts: list[Numbers] = []
    for layers in runs:
        states: list[Numbers] = []
        for layer in layers:
            for first, event in placed:
                start = first + event.layer_starts[layer]
                end = start + event.layer_pages[layer]
                parts.append(np.arange(start, end))
                states.append(np.arange(end, end + event.state_pages[layer]))
        parts += states
    return pages[upload(np.concatenate(parts), pool.device)]


def _protected(events: list[Event], pool: PagePool) -> Tensor | None:
    """Returns the bounds of what requests protect; see `EventBatch.protected`."""
    longest = max(len(event.plan.protected) for event in events)
    if not longest:
        return None
    bounds: Numbers = np.zeros((len(events), 1 + longest, 2), dtype=np.int64)
    for row, event in zip(bounds, events, strict=True):
        spans, end = event.plan.protected, event.plan.end_block * pool.block_size
        row[0, 1] = num_in_spans(spans, event.plan.first_block * pool.block_size)
        row[1 : 1 + len(spans)] = np.reshape(spans, (-1, 2))
        if not event.pipeline.keeps_spans_whole:
            row[0, 1] = end
            np.minimum(row, end, out=row)
    return upload(bounds, pool.device)


def _totals(events: list[Event], runs: list[range], pool: PagePool) -> list[Totals]:
    """Returns the pages to keep in each run of layers."""
    pages = np.array([event.layer_pages for event in events]).T
    size = pool.block_size
    protected = [
        protected_pages(
            event.pipeline,
            event.num_tail,
            size,
            num_protected(event.pipeline, event.plan, size),
        )
        for event in events
    ]
    floors = np.minimum(protected, pages // pool.num_heads)
    uploaded = upload(np.stack((pages, floors)), pool.device)
    counts = pages.sum(axis=1)
    return [
        Totals(
            int(counts[run.start : run.stop].sum()), *uploaded[:, run.start : run.stop].flatten(1)
        )
        for run in runs
    ]
