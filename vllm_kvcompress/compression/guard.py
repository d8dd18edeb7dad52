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
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.runner import EventRunner
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
        What is to run in the next layer: where something failed, its events one by one, and
        layer by layer.
    """
    found = []
    for batch in batches:
        try:
            runner.run_layer(batch, layer, scale)
            found.append(batch)
        except Exception as error:
            found += _run_apart(runner, batch, layer, scale, error)
    return found


def _run_apart(
    runner: EventRunner, failed: EventBatch, layer: int, scale: float, error: Exception
) -> list[EventBatch]:
    """Events of a batch that failed, one by one, in all layers that have waited for this one.

    Only alone, in one layer, it is known whose fault it was.
    """
    waiting = range(failed.layers[layer].layers.start, layer + 1)
    held: dict[int, Tensor] = {}
    if len(failed.events) == len(waiting) == 1:
        return [_fall_back(runner, failed.events[0], layer, scale, error)]
    if len(failed.events) == 1:
        held = dict(zip(waiting, failed.held, strict=False))
    message = "%s failed for %d requests and %d layers together: one by one"
    logger.warning(message, failed.pipeline.name, len(failed.events), len(waiting))
    found = []
    for event in failed.events:
        batch = EventBatch.of([event], runner.pool)
        for each in waiting:
            try:
                runner.run_layer(batch, each, scale, held.get(each))
            except Exception as its_own:
                batch = _fall_back(runner, event, each, scale, its_own)
        found.append(batch)
    return found


def _fall_back(
    runner: EventRunner, event: Event, layer: int, scale: float, error: Exception
) -> EventBatch:
    """What is to run in the next layer, after an event that failed by itself."""
    if event.error is not None or runner.observer is not None:
        raise error
    event.fall_back(_FALLBACK, error)
    batch = EventBatch.of([event], runner.pool)
    runner.run_layer(batch, layer, scale)
    return batch
