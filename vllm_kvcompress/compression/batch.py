"""Events of one step that run together, as if the heads of all requests were one layer's.

    rows of heads    [ request 0: head 0, head 1, .. ][ request 1: head 0, .. ] ..

An event of a short prompt is little work in many operators, so those of several cost hardly more
than that of one. Requests keep budgets, lengths and pages of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.policy_state import StateRows
from vllm_kvcompress.cache.query_windows.rings import WindowPlaces
from vllm_kvcompress.compression.layer import Totals, protected_pages
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies import Pipeline

if TYPE_CHECKING:
    from vllm_kvcompress.compression.runner import Event

MOST_PADDING = 1.25  # of the shortest one's length: what is computed for nothing
MOST_TOKENS = 16_384  # of all that run together, padded; longer events are work enough alone
Numbers = np.ndarray[Any, np.dtype[np.int64]]


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
        totals: pages that each layer keeps.
        pages: [any] int64 fresh pages, layer after layer: those for the tokens of all requests,
            then those for their policy states.
        starts: where each layer's begin.
        state: whose the latter are.
        queries_at: where the observed queries are, once it is known.
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
    totals: list[Totals]
    pages: Tensor
    starts: list[int]
    state: StateRows
    queries_at: WindowPlaces | None = field(default=None, init=False)

    @property
    def window_size(self) -> int:
        """Queries observed."""
        return self.events[0].plan.window_size

    @property
    def resident(self) -> bool:
        """Whether they read what former events have kept."""
        return self.events[0].plan.resident_blocks > 0

    @classmethod
    def of(cls, events: list[Event], pool: PagePool) -> EventBatch:
        """Of events that `together` puts together."""
        first, device = events[0], pool.device
        numbers = [
            (event.slot, event.num_full, event.plan.first_block * pool.block_size, event.num_tail)
            for event in events
        ]
        slots, num_full, first_tokens, tails = upload(np.array(numbers).T.copy(), device)
        blocks, pages = first.blocks[None], first.fresh_pages
        if len(events) > 1:
            blocks = pad_sequence([event.blocks for event in events], batch_first=True)
            pages = torch.cat([event.fresh_pages for event in events])
            pages = pages[upload(_by_layer(events), device)]
        of_layer = np.array([event.layer_pages for event in events]).sum(axis=0)
        of_layer += sum(event.state_pages for event in events)
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
            totals=_totals(events, pool),
            pages=pages,
            starts=(of_layer.cumsum() - of_layer).tolist(),
            state=StateRows.of([(e.slot, e.state_pages) for e in events], pool),
        )


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


def _by_layer(events: list[Event]) -> Numbers:
    """Places in all events' fresh pages, in the order of `EventBatch.pages`."""
    ends = np.cumsum([event.fresh_pages.numel() for event in events])
    firsts = [int(end) - event.fresh_pages.numel() for end, event in zip(ends, events, strict=True)]
    parts = []
    for layer in range(len(events[0].layer_pages)):
        starts = [first + e.layer_starts[layer] for first, e in zip(firsts, events, strict=True)]
        ends = [at + e.layer_pages[layer] for at, e in zip(starts, events, strict=True)]
        parts += [np.arange(at, end) for at, end in zip(starts, ends, strict=True)]
        parts += [np.arange(end, end + e.state_pages) for end, e in zip(ends, events, strict=True)]
    found: Numbers = np.concatenate(parts)
    return found


def _totals(events: list[Event], pool: PagePool) -> list[Totals]:
    """Of every layer."""
    pages = np.array([event.layer_pages for event in events]).T
    protected = [
        protected_pages(event.pipeline, event.num_tail, pool.block_size) for event in events
    ]
    floors = np.minimum(protected, pages // pool.num_heads)
    there = upload(np.stack((pages, floors), axis=1), pool.device).unbind()
    counts = pages.sum(axis=1).tolist()
    return [Totals(count, *both) for count, both in zip(counts, there, strict=True)]
