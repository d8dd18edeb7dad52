"""Records what a worker's events keep; sent to workers through `LLM.collective_rpc`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.kernels.merging.moments import unpack_moments
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.tools.evaluation.attention_loss import AttentionLoss


class Observer:
    """Records the events of one cache group and, if `loss` is given, what attention loses by them.

    Attributes:
        block_size: tokens per block.
        loss: None: not measured.
        events: the events so far, as plain numbers.
    """

    def __init__(self, block_size: int, loss: AttentionLoss | None) -> None:
        self.block_size = block_size
        self.loss = loss
        self.events: list[dict[str, Any]] = []

    def compressed(
        self, event: Event, layer: int, view: LayerView, values: Tensor, selection: Selection
    ) -> None:
        """See `EventObserver`."""
        if self.loss is not None:
            moments, state = None, selection.merged.state
            if event.pipeline.corrects and state is not None:
                moments = unpack_moments(state, view.kv.head_size)
            self.loss.compress(event.plan, layer, event.slot, view, values, selection, moments)

    def attended(self, layer: int, batch: ResidentBatch, *step: Any) -> None:
        """See `EventObserver`."""
        if self.loss is not None:
            self.loss.observe(layer, batch, *step)

    def finished(self, event: Event) -> None:
        """Records what the event did."""
        size = self.block_size
        self.events.append(
            {
                "request_id": event.plan.request_id,
                "group": event.plan.group,
                "position": event.plan.position,
                "compressed_tokens": event.plan.end_block * size,
                "kept_tokens": [(counts * size).tolist() for counts in event.page_counts],
                # As tokens per head.
                "policy_state_tokens": event.state_pages * size / len(event.page_counts[0]),
            }
        )


def watch(worker: Any, measures: bool) -> None:
    """Installs an observer in our worker's cache groups; it `measures` attention's loss, or not."""
    for group in worker.compression.groups.values():
        pool = group.tables.pool
        loss = None
        if measures:
            loss = AttentionLoss(pool, group.softcap, worker.compression.output_weights(group))
        group.runner.observer = Observer(pool.block_size, loss)


def watched(worker: Any) -> dict[str, Any]:
    """Returns what was seen since `watch`, as plain numbers.

    `events` has the position and the tokens kept by layer and head; `heads` is what
    `AttentionLoss.means` returns, empty where nothing was measured.
    """
    observers = [group.runner.observer for group in worker.compression.groups.values()]
    heads: dict[str, list[list[float]]] = {}
    for observer in observers:
        for name, layers in observer.loss.means().items() if observer.loss is not None else ():
            heads.setdefault(name, []).extend(layers)
    events = [event for observer in observers for event in observer.events]
    return {"events": events, "heads": heads}
