"""Who may look on while events run; while requests are served, nobody does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.policies.base import LayerView, Selection


class EventObserver(Protocol):
    """What measuring tools see of one cache group's events, and of attention after them."""

    def compressed(
        self, event: Event, layer: int, view: LayerView, values: Tensor, selection: Selection
    ) -> None:
        """A layer was compressed.

        Args:
            event: of which request.
            layer: of the group.
            view: what the policy saw.
            values: [num_heads, n, head_size] beside the view's keys.
            selection: what is kept.
        """

    def attended(
        self,
        layer: int,
        batch: ResidentBatch,
        starts: Tensor,
        positions: Tensor,
        queries: Tensor,
        outputs: Tensor,
        scale: float,
    ) -> None:
        """Attention of a step is done.

        Args:
            layer: of the group.
            batch: the compressed requests.
            starts: [rows + 1] first token of every row of the batch.
            positions: [rows] logical tokens, this step's included.
            queries, outputs: [num_tokens, num_query_heads, head_size] of all requests.
            scale: of the logits.
        """

    def finished(self, event: Event) -> None:
        """The last layer was compressed."""
