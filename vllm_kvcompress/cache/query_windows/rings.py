"""The last queries of requests that are about to be compressed.

Most windows lie in the step that ends with the event: they are read where they lie. A window can
also straddle two prefill chunks, and a decode step brings one query at a time. Such queries are
recorded as they come, in a ring per request and layer: the query of position p lies at p modulo the
window size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Located:
    """Observed queries of a step; beside the rings.

    Attributes:
        tokens: [T] int64 places in the batch.
        places: [T] or [T, num_query_heads] int64 rows of the rings' memory, before a
            layer's offset.
        whole: by request, places in the batch of a window that takes no ring.
    """

    tokens: Tensor
    places: Tensor
    whole: Mapping[str, slice] = field(default_factory=dict)


@dataclass(frozen=True)
class Destinations:
    """Where queries of a step of single tokens go, by address.

    Attributes:
        tokens: [T] places in the batch.
        addresses: [T, num_query_heads] of each head's query, in the first layer.
        layer_bytes: [num_layers] int64 how many bytes behind these, in each layer; on the device.
    """

    tokens: Numbers
    addresses: Numbers
    layer_bytes: Tensor


@dataclass(frozen=True)
class WindowPlaces:
    """Where the last queries of R requests are, before an event.

    Attributes:
        rows: [num_queries, R] or [num_queries, R, num_query_heads] int64 of what they are read
            from, before a layer's offset.
        whole: they are read from the batch, not from rings.
    """

    rows: Tensor
    whole: bool


def lay_out(rows: list[tuple[str, int, Observation]]) -> tuple[Numbers, Numbers, Numbers]:
    """Observed tokens of all requests, one after the other.

    Args:
        rows: request id, the request's first token in the batch, and what to observe of it.

    Returns:
        [T] int64 each: place in the batch, which of `rows`, position in the request.
    """
    # One number of each kind per request; their tokens are then laid out together.
    tokens, positions, counts = np.array(
        [(first + seen.offset, seen.position, seen.num_tokens) for _, first, seen in rows]
    ).T
    row: Numbers = np.repeat(np.arange(len(rows)), counts)
    nth = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    return tokens[row] + nth, row, positions[row] + nth


def whole_window(first: int, seen: Observation, event: EventPlan | None) -> slice | None:
    """Places in the batch of all queries that an event looks at; None: some came before it.

    Args:
        first: the request's first token in the batch.
        seen: what of it is observed.
        event: at the end of this step; None: there is none.
    """
    if event is None or event.position - event.window_size < seen.position:
        return None
    end = first + seen.offset + event.position - seen.position
    return slice(end - event.window_size, end)


class QueryWindows:
    """Rings of queries, one slot per observed request.

    Args:
        num_layers: of the cache group.
        window_size: queries per ring.
        device: of the queries.
        num_rings: that are made at first use; more follow, eight at a time.

    Attributes:
        window_size: queries per ring.
        ring: [num_layers, slots, window_size, num_query_heads, head_size], allocated at first use.
    """

    def __init__(
        self, num_layers: int, window_size: int, device: torch.device, num_rings: int = 8
    ) -> None:
        self.num_rings = num_rings
        self.num_layers = num_layers
        self.window_size = window_size
        self.device = device
        self.ring: Tensor | None = None
        self._layers: tuple[Tensor, ...] = ()  # of it, [places, num_query_heads, head_size]
        self.slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._whole: Mapping[str, slice] = {}
        self._queries: Tensor | None = None
        self._layer_bytes: Tensor | None = None

    def locate(
        self, rows: list[tuple[str, int, Observation]], events: Sequence[EventPlan] = ()
    ) -> Located:
        """Where this step's observed queries come from and go to.

        Args:
            rows: request id, the request's first token in the batch, and what to observe of it.
            events: of this step, in which each layer is recorded before it is read.
        """
        ending = {event.request_id: event for event in events}
        whole: dict[str, slice] = {}
        straddling = []
        for request_id, first, seen in rows:
            found = whole_window(first, seen, ending.get(request_id))
            if found is None:
                straddling.append((request_id, first, seen))
            else:
                whole[request_id] = found
        if not straddling:
            nowhere = torch.empty(0, dtype=torch.int64, device=self.device)
            return Located(nowhere, nowhere, whole)
        sources, targets = upload(np.stack(self._places(straddling)), self.device)
        return Located(sources, targets, whole)

    def destinations(self, rows: list[tuple[str, int, Observation]], like: Tensor) -> Destinations:
        """As `locate`, of rings alone; `like` is [any, num_query_heads, head_size]."""
        self._whole, self._queries = {}, None
        tokens, places = self._places(rows)
        self._reserve(like)
        ring = self.ring
        assert ring is not None
        assert self._layer_bytes is not None
        num_heads, row_bytes = ring.shape[3], ring.stride(3) * ring.itemsize
        heads = places[:, None] * num_heads + np.arange(num_heads)
        return Destinations(tokens, ring.data_ptr() + heads * row_bytes, self._layer_bytes)

    def _places(self, rows: list[tuple[str, int, Observation]]) -> tuple[Numbers, Numbers]:
        """[T] places in the batch, and of the rings' rows in a layer."""
        tokens, row, positions = lay_out(rows)
        slots = np.array([self._slot(request_id) for request_id, _, _ in rows])[row]
        return tokens, slots * self.window_size + positions % self.window_size

    def record(self, layer: int, queries: Tensor, where: Located) -> None:
        """Copies observed rows of [num_tokens, num_query_heads, head_size] into the rings.

        Whole windows are not copied: until the next layer is recorded they are read from `queries`.
        """
        self._whole, self._queries = where.whole, queries if where.whole else None
        if where.tokens.numel():
            self._reserve(queries)
            self._layers[layer][where.places] = queries[where.tokens]

    def is_whole(self, request_id: str) -> bool:
        """Whether the request's window lies in the step that was recorded last."""
        return request_id in self._whole

    def find(self, windows: Sequence[tuple[str, int]], num_queries: int) -> WindowPlaces:
        """Where windows are, all of them in the batch or all in rings.

        Args:
            windows: request id, and the position that the window ends before.
            num_queries: of each.
        """
        nth = np.arange(num_queries)[:, None]
        if whole := self.is_whole(windows[0][0]):
            rows = np.array([self._whole[request_id].start for request_id, _ in windows]) + nth
        else:
            slots, ends = np.array([(self.slots[each], end) for each, end in windows]).T
            rows = slots * self.window_size + (ends - num_queries + nth) % self.window_size
        return WindowPlaces(upload(rows, self.device), whole)

    def read(self, layer: int, where: WindowPlaces) -> Tensor:
        """[num_queries, R, num_query_heads, head_size] queries of a layer."""
        if where.whole:
            assert self._queries is not None
            chosen = self._queries.index_select(0, where.rows.flatten())
            return chosen.unflatten(0, where.rows.shape)
        return self._layers[layer][where.rows]

    def end_event(self, request_id: str) -> None:
        """Frees a request's ring, until an event comes near again."""
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Frees a request's ring; unknown requests are ignored."""
        if request_id in self._whole:
            self._whole, self._queries = {}, None
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)

    def _slot(self, request_id: str) -> int:
        if request_id not in self.slots:
            free = self._free_slots
            self.slots[request_id] = free.pop() if free else len(self.slots)
        return self.slots[request_id]

    def _reserve(self, queries: Tensor) -> None:
        """Makes room for every slot handed out."""
        have = 0 if self.ring is None else self.ring.shape[1]
        need = len(self.slots) + len(self._free_slots)
        if need <= have:
            return
        num_rings = max(self.num_rings, ceil_div(need, 8) * 8)
        size = (self.num_layers, num_rings, self.window_size, *queries.shape[1:])
        ring = queries.new_zeros(size)
        if self.ring is not None:
            ring[:, :have] = self.ring
        self.ring, self._layers = ring, ring.flatten(1, 2).unbind()
        layers = np.arange(self.num_layers) * (ring.stride(0) * ring.itemsize)
        self._layer_bytes = upload(layers, self.device)
