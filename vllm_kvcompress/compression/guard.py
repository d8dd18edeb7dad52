"""Events whose policy fails: what is kept instead, so that others are served on.

The scheduler has planned an event's blocks before it runs, and attention reads them from the next
step on. So the pages of a failed layer, and of all after it, are filled with the first tokens and
the most recent ones. That is safe whatever the policy had written: sources are only read, nobody
reads the fresh pages before the layer's rows are replaced, and every one of them is written anew.

It cannot help where the device itself has failed (an illegal address on a GPU): then the fallback
fails as well, and with it the engine.
"""

from __future__ import annotations

from torch import Tensor

from vllm_kvcompress.compression.runner import Event, EventRunner
from vllm_kvcompress.policies.parts.allocation import UNIFORM
from vllm_kvcompress.policies.streamingllm import StreamingLLM
from vllm_kvcompress.scheduling.plan import EventPlan

_FALLBACK = StreamingLLM().pipeline()


def begin(runner: EventRunner, plan: EventPlan, block_row: Tensor) -> Event:
    """As `EventRunner.begin`; all layers get the same where the policy cannot divide pages."""
    try:
        return runner.begin(plan, block_row)
    except Exception as error:
        event = runner.begin(plan, block_row, UNIFORM)
        event.fall_back(_FALLBACK, error)
        return event


def run_layer(runner: EventRunner, event: Event, layer: int, scale: float) -> None:
    """As `EventRunner.run_layer`; errors are raised only where somebody measures."""
    try:
        runner.run_layer(event, layer, scale)
    except Exception as error:
        if event.error is not None or runner.observer is not None:
            raise
        event.fall_back(_FALLBACK, error)
        runner.run_layer(event, layer, scale)
