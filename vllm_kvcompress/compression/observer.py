"""The interface of tools that observe events; serving installs none."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.policies.base import LayerView, Selection


class EventObserver(Protocol):
    """Receives one cache group's events, which run one by one and layer by layer."""

    def compressed(
        self, event: Event, layer: int, view: LayerView, values: Tensor, selection: Selection
    ) -> None:
        """Called when a layer was compressed; `values` are [num_heads, n, head_size]."""
