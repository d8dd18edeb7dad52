"""Events of one step that run together, as if the heads of all requests were one layer's.

    rows of heads    [ request 0: head 0, head 1, .. ][ request 1: head 0, .. ] ..

An event of a short prompt is little work in many operators, so those of several cost hardly more
than that of one. Requests keep budgets, lengths and pages of their own.

An event that runs alone does so for several layers at once, for the same reason: as soon as the
last of them has been computed.

    rows of heads    [ layer 0: head 0, head 1, .. ][ layer 1: head 0, .. ] ..

Until then the queries that it observes are held.
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
from vllm_kvcompress.cache.policy_state import StateRows
from vllm_kvcompress.cache.query_windows.rings import WindowPlaces
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.layer import Totals, protected_pages
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.rounding import ceil_div

MOST_PADDING = 1.25  # of the shortest one's length: what is computed for nothing
MOST_TOKENS = 16_384  # of all that run together, padded; longer events are work enough alone
# Of their keys on CPUs, where operators gather them: larger tensors are slower than several small
# ones (twice as slow for `keydiff` on layers of Llama-3.1-8B's shape, 16 MiB).
MOST_BYTES = 8 * 2**20
MOST_LAYERS = 8  # of an event that run together; more save little
MOST_WINDOWS = 32  # of all events of a step, whose queries are held for later layers
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class EventLayers:
    """Consecutive layers that events are run for at once, at the end of the last one.

    R counts requests or, where there are several layers, these.

    Attributes:
        layers: which.
        totals: pages that are kept.
        pages: [any] int64 fresh pages for the tokens of all.
        state_pages: [any] int64 likewise, for their policy states.
        state: whose the latter are.
    """

    layers: range
    totals: Totals
    pages: Tensor
    state_pages: Tensor
    state: StateRows


@dataclass
class EventBatch:
    """R events, while their step runs: one policy, one size of window, similar lengths.

    Attributes:
        events: of different requests.
        pipeline: their policy.
        slots: [R] int64 their rows in the page tables.
        blocks: [R, any] int64 block ids of full blocks, and of the partial one behind them.
        num_full: [R, 1] int64 full blocks of each tail.
        first_tokens: [R, 1] int64 logical tokens before it.
        num_body: columns that full pages may lie in.
        num_tail: tokens of the longest partial block.
        tails: [R, 1] int64 of each, where they differ; else None.
        layers: by layer, those that it runs with.
        queries_at: where the observed queries are, once it is known.
        held: of the layers since events were run last, the queries; oldest first.
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
    layers: list[EventLayers]
    queries_at: WindowPlaces | None = field(default=None, init=False)
    held: list[Tensor] = field(default_factory=list, init=False)

    @property
    def window_size(self) -> int:
        """Queries observed."""
        return self.events[0].plan.window_size

    @property
    def resident(self) -> bool:
        """Whether they read what former events have kept."""
        return self.events[0].plan.resident_blocks > 0

    @classmethod
    def of(cls, events: list[Event], pool: PagePool, num_layers: int = 1) -> EventBatch:
        """Of events that `together` puts together, in so many layers at once."""
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
            layers=list(_layers(events, pool, num_layers)),
        )


def most_together(pool: PagePool) -> int:
    """Tokens of events, or of an event's layers, that run together."""
    if pool.device.type != "cpu":
        return MOST_TOKENS
    token_bytes: int = pool.num_heads * pool.head_size * pool.dtype.itemsize
    return min(MOST_TOKENS, MOST_BYTES // token_bytes)


def layers_together(pipeline: Pipeline, num_tokens: int, most_tokens: int) -> int:
    """In how many layers at once an event of so many tokens may run, without others.

    One where it is not known of the policy, and where mergers, or weights of the output
    projection, would take as many times the memory as there are layers.
    """
    alone = not pipeline.batches or pipeline.merger is not None or pipeline.needs.output_weight
    return 1 if alone else max(1, min(MOST_LAYERS, most_tokens // max(1, num_tokens)))


def together(events: Iterable[Event], whole: Iterable[str], most_tokens: int) -> list[list[Event]]:
    """Which events of a step run together, each in one of the lists.

    Args:
        events: of one cache group.
        whole: requests whose windows are read from the batch.
        most_tokens: of all that run together, padded.
    """
    whole = set(whole)

    def kind(event: Event) -> Hashable:
        plan = event.plan
        if event.error is not None or not event.pipeline.batches:
            return plan.request_id
        kept_before = plan.resident_blocks > 0
        in_batch = plan.request_id in whole
        return id(event.pipeline), plan.window_size, kept_before, in_batch

    alike: dict[Hashable, list[Event]] = {}
    for event in events:
        alike.setdefault(kind(event), []).append(event)
    found: list[list[Event]] = []
    for some in alike.values():
        batch: list[Event] = []
        for event in sorted(some, key=lambda event: event.num_tokens):
            length = event.num_tokens
            fits = batch and length <= MOST_PADDING * batch[0].num_tokens
            if not fits or length * (len(batch) + 1) > most_tokens:
                batch = []
                found.append(batch)
            batch.append(event)
    return found


def _layers(events: list[Event], pool: PagePool, num_together: int) -> Iterator[EventLayers]:
    """By layer; layers that run together have the same."""
    number = ceil_div(pool.num_layers, num_together)
    firsts = [nth * pool.num_layers // number for nth in range(number + 1)]
    runs = [range(*ends) for ends in pairwise(firsts)]
    pages = _pages(events, runs, pool)
    totals = _totals(events, runs, pool)
    states: dict[int, StateRows] = {}
    start = 0
    for layers, total in zip(runs, totals, strict=True):
        if len(layers) not in states:
            rows = [
                (nth, event.slot, event.state_pages)
                for nth in range(len(layers))
                for event in events
            ]
            states[len(layers)] = StateRows.of(rows, pool)
        state = states[len(layers)]
        end = start + total.num_pages
        behind = pages[end : end + state.num_pages]
        found = EventLayers(layers, total, pages[start:end], behind, state)
        yield from [found] * len(layers)
        start = end + state.num_pages


def _pages(events: list[Event], runs: list[range], pool: PagePool) -> Tensor:
    """[any] int64 fresh pages of all events: by layers that run together, first those for tokens,
    then those for policy states."""
    pages = events[0].fresh_pages
    if len(events) > 1:
        pages = torch.cat([event.fresh_pages for event in events])
    elif len(runs) == pool.num_layers or not events[0].state_pages:
        return pages  # as they are
    ends = np.cumsum([event.fresh_pages.numel() for event in events])
    firsts = [int(end) - event.fresh_pages.numel() for end, event in zip(ends, events, strict=True)]
    there = list(zip(firsts, events, strict=True))
    parts: list[Numbers] = []
    for layers in runs:
        states: list[Numbers] = []
        for layer in layers:
            for first, event in there:
                start = first + event.layer_starts[layer]
                end = start + event.layer_pages[layer]
                parts.append(np.arange(start, end))
                states.append(np.arange(end, end + event.state_pages))
        parts += states
    return pages[upload(np.concatenate(parts), pool.device)]


def _totals(events: list[Event], runs: list[range], pool: PagePool) -> list[Totals]:
    """Of layers that run together."""
    pages = np.array([event.layer_pages for event in events]).T
    protected = [
        protected_pages(event.pipeline, event.num_tail, pool.block_size) for event in events
    ]
    floors = np.minimum(protected, pages // pool.num_heads)
    there = upload(np.stack((pages, floors)), pool.device)
    counts = pages.sum(axis=1)
    return [
        Totals(int(counts[run.start : run.stop].sum()), *there[:, run.start : run.stop].flatten(1))
        for run in runs
    ]
