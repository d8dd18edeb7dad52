"""The interface of tools that observe events; serving installs none."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.policies.base import LayerView, Selection


class EventObserver(Protocol):
    """Receives one cache group's events, and the attention computed after them."""

    def compressed(
        self, event: Event, layer: int, view: LayerView, values: Tensor, selection: Selection
    ) -> None:
        """Called when a layer was compressed; `values` are [num_heads, n, head_size]."""

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
        """Called when a layer's attention was computed.

        Args:
            layer, batch, scale: layer number in the group, its compressed requests, softmax scale.
            starts: [rows + 1] first token of each request in the step.
            positions: [rows] logical tokens of each request, this step's included.
            queries, outputs: [num_tokens, num_query_heads, head_size] of all requests.
        """

    def finished(self, event: Event) -> None:
        """Called when the last layer was compressed."""
