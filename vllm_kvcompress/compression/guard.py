"""The fallback for events whose policy fails, so that all other requests are served on.

The scheduler has planned an event's blocks before it runs, and attention reads them from the next
step on. So the pages of the failed layer and all later layers take the first and the most recent
tokens. That is safe whatever the policy has written: sources are only read, nothing reads the fresh
pages before the layer's page-table rows are replaced, and every fresh page is written again. An
event in place writes to its sources, but only behind everything in which a policy can fail.

Where the device itself has failed (an illegal address on a GPU) the fallback fails too, and the
engine ends.
"""

from __future__ import annotations

import logging
from itertools import zip_longest

from torch import Tensor

from vllm_kvcompress.compression.batch import EventBatch
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.policies.parts.allocation import UNIFORM
from vllm_kvcompress.policies.streamingllm import StreamingLLM
from vllm_kvcompress.scheduling.plan import EventPlan

_FALLBACK = StreamingLLM().pipeline()
logger = logging.getLogger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


def begin(runner: EventRunner, plan: EventPlan, block_row: Tensor) -> Event:
    """Calls `EventRunner.begin`; where the policy fails to divide pages, layers get equal parts."""
    try:
        return runner.begin(plan, block_row)
    except Exception as error:
        event = runner.begin(plan, block_row, UNIFORM)
        event.fall_back(_FALLBACK, error)
        return event


def run_layer(
    runner: EventRunner, batches: list[EventBatch], layer: int, scale: float
) -> list[EventBatch]:
    """Calls `EventRunner.run_layer` for each batch; raises errors only with an observer.

    Returns:
        The batches to run in the next layer; a batch that failed is split into single events.
    """
    next_batches = []
    for batch in batches:
        try:
            runner.run_layer(batch, layer, scale)
            next_batches.append(batch)
        except Exception as error:
            next_batches += _run_one_by_one(runner, batch, layer, scale, error)
    return next_batches


def _run_one_by_one(
    runner: EventRunner, failed: EventBatch, layer: int, scale: float, error: Exception
) -> list[EventBatch]:
    """Runs the events of a failed batch alone, layer by layer, to find the one that fails."""
    waiting = range(failed.layers[layer].layers.start, layer + 1)
    num_events = len(failed.events)
    if num_events == len(waiting) == 1:
        return [_fall_back(runner, failed.events[0], layer, scale, error)]
    held = [queries.chunk(num_events, dim=1) for queries in failed.held_queries]
    message = "%s failed for a batch of %d requests and %d layers; running them one by one"
    logger.warning(message, failed.pipeline.name, num_events, len(waiting))
    batches = []
    for number, event in enumerate(failed.events):
        batch = EventBatch.of([event], runner.pool)
        for waiting_layer, queries in zip_longest(waiting, held):
            try:
                own = None if queries is None else queries[number]
                runner.run_layer(batch, waiting_layer, scale, own)
            except Exception as event_error:
                batch = _fall_back(runner, event, waiting_layer, scale, event_error)
        batches.append(batch)
    return batches


def _fall_back(
    runner: EventRunner, event: Event, layer: int, scale: float, error: Exception
) -> EventBatch:
    """Lets the fallback policy run this layer, and returns the batch for the next layer."""
    if event.error is not None or runner.observer is not None:
        raise error
    event.fall_back(_FALLBACK, error)
    batch = EventBatch.of([event], runner.pool)
    runner.run_layer(batch, layer, scale)
    return batch
