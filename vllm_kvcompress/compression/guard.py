"""Events whose policy fails: what is kept instead, so that others are served on.

The scheduler has planned an event's blocks before it runs, and attention reads them from the next
step on. So the pages of a failed layer, and of all after it, are filled with the first tokens and
the most recent ones. That is safe whatever the policy had written: sources are only read, nobody
reads the fresh pages before the layer's rows are replaced, and every one of them is written anew.

It cannot help where the device itself has failed (an illegal address on a GPU): then the fallback
fails as well, and with it the engine.
"""

from __future__ import annotations

import logging

from torch import Tensor

from vllm_kvcompress.compression.batch import EventBatch
from vllm_kvcompress.compression.runner import Event, EventRunner
from vllm_kvcompress.policies.parts.allocation import UNIFORM
from vllm_kvcompress.policies.streamingllm import StreamingLLM
from vllm_kvcompress.scheduling.plan import EventPlan

_FALLBACK = StreamingLLM().pipeline()
logger = logging.getLogger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


def begin(runner: EventRunner, plan: EventPlan, block_row: Tensor) -> Event:
    """As `EventRunner.begin`; all layers get the same where the policy cannot divide pages."""
    try:
        return runner.begin(plan, block_row)
    except Exception as error:
        event = runner.begin(plan, block_row, UNIFORM)
        event.fall_back(_FALLBACK, error)
        return event


def run_layer(
    runner: EventRunner, batches: list[EventBatch], layer: int, scale: float
) -> list[EventBatch]:
    """As `EventRunner.run_layer`; errors are raised only where somebody measures.

    Returns:
        What is to run in the next layer: where something failed, its events one by one.
    """
    found = []
    for batch in batches:
        try:
            runner.run_layer(batch, layer, scale)
            found.append(batch)
        except Exception as error:
            if len(batch.events) > 1:
                policy, number = batch.pipeline.name, len(batch.events)
                logger.warning("%s failed for %d requests together: one by one", policy, number)
            for event in batch.events:
                found.append(_run_alone(runner, event, layer, scale, error, len(batch.events)))
    return found


def _run_alone(
    runner: EventRunner, event: Event, layer: int, scale: float, error: Exception, beside: int
) -> EventBatch:
    """One event of a batch of `beside` that failed; only alone it is known to be its own fault."""
    if beside > 1:
        batch = EventBatch.of([event], runner.pool)
        try:
            runner.run_layer(batch, layer, scale)
            return batch
        except Exception as its_own:
            error = its_own
    if event.error is not None or runner.observer is not None:
        raise error
    event.fall_back(_FALLBACK, error)
    batch = EventBatch.of([event], runner.pool)
    runner.run_layer(batch, layer, scale)
    return batch
