"""The last queries of running requests, which policies score with at compression events.

Most windows lie in the step that ends with the event and are read from its batch. A window can
also straddle two prefill chunks, and a decode step brings one query at a time. Such queries are
recorded in a ring buffer per request and layer: position p lies at p modulo the window size.

    QueryWindows   ring buffers in a tensor of their own, for requests whose event is near
    PagedWindows   ring buffers in blocks that the scheduler allocates to each request: under
                   the pressure trigger any request may be compressed at any token
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import Integers, PagePool
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

# A request's id, its first row in the batch, and what to observe of it.
ObservedRequest = tuple[str, int, Observation]


class QueryRows(Protocol):
    """[num_tokens, num_query_heads, head_size] queries of a step, some of which are read by row.

    A tensor, or queries that are computed when they are asked for (MLA).
    """

    def __getitem__(self, rows: Tensor | slice, /) -> Tensor:
        """Returns the queries of [T] int64 or consecutive rows."""


@dataclass(frozen=True)
class ObservedQueries:
    """Queries of a step that are recorded, on the device of the ring buffers.

    Attributes:
        tokens: [T] int64 rows in the batch that go into ring buffers.
        rows: [T] or [T, num_query_heads] int64 rows of the ring buffers, before a layer's offset.
        in_step: by request id, the rows in the batch of a window that lies in the step completely
            and needs no ring buffer.
    """

    tokens: Tensor
    rows: Tensor
    in_step: Mapping[str, slice] = field(default_factory=dict)


@dataclass(frozen=True)
class QueryAddresses:
    """Memory addresses to which a captured decode step writes queries.

    Attributes:
        tokens: [T] rows in the batch.
        addresses: [T, num_query_heads] address of each head's query in the first layer.
        layer_bytes: [num_layers] int64 bytes from the first layer to each layer, on the device.
    """

    tokens: Integers
    addresses: Integers
    layer_bytes: Tensor


@dataclass(frozen=True)
class WindowRows:
    """Rows that hold the windows of R requests at an event.

    Attributes:
        rows: [num_queries, R] or [num_queries, R, num_query_heads] int64 rows of the batch or of
            the ring buffers, before a layer's offset.
        in_step: whether the rows belong to the batch.
    """

    rows: Tensor
    in_step: bool


def observed_tokens(observations: list[ObservedRequest]) -> tuple[Integers, Integers, Integers]:
    """Lists the observed tokens of all requests, one request after the other.

    Returns:
        [T] int64 each: row in the batch, index into `observations`, position in the request.
    """
    first_rows, positions, counts = np.array(
        [(first + seen.offset, seen.position, seen.num_tokens) for _, first, seen in observations]
    ).T
    index: Integers = np.repeat(np.arange(len(observations)), counts)
    steps = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
    return first_rows[index] + steps, index, positions[index] + steps


class QueryWindows:
    """Ring buffers in a tensor, one slot per observed request.

    Args:
        num_layers: layers of the cache group.
        window_size: queries per ring buffer.
        device: device of the queries.
        num_buffers: slots allocated at first use; more follow, eight at a time.

    Attributes:
        buffers: [num_layers, slots, window_size, num_query_heads, head_size], allocated at first
            use.
    """

    def __init__(
        self, num_layers: int, window_size: int, device: torch.device, num_buffers: int = 8
    ) -> None:
        self.num_buffers = num_buffers
        self.num_layers = num_layers
        self.window_size = window_size
        self.device = device
        self.buffers: Tensor | None = None
        self._layers: tuple[Tensor, ...] = ()  # views [rows, num_query_heads, head_size]
        self.slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._in_step: Mapping[str, slice] = {}
        self._queries: QueryRows | None = None
        self._layer_bytes: Tensor | None = None

    def locate(
        self, observations: list[ObservedRequest], events: Sequence[EventPlan] = ()
    ) -> ObservedQueries:
        """Finds where this step's observed queries lie and where they are recorded.

        Args:
            observations: the step's observed requests.
            events: the step's events, each of which reads a layer right after it is recorded.
        """
        ending = {event.request_id: event for event in events}
        in_step: dict[str, slice] = {}
        straddling = []
        for request_id, first, seen in observations:
            event = ending.get(request_id)
            if event is None or event.position - event.window_size < seen.position:
                straddling.append((request_id, first, seen))
            else:
                end = first + seen.offset + event.position - seen.position
                in_step[request_id] = slice(end - event.window_size, end)
        if not straddling:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return ObservedQueries(empty, empty, in_step)
        tokens, rows = upload(np.stack(self._buffer_rows(straddling)), self.device)
        return ObservedQueries(tokens, rows, in_step)

    def addresses(self, observations: list[ObservedRequest], like: Tensor) -> QueryAddresses:
        """Returns where a captured step records the observed queries: always in ring buffers.

        Args:
            observations: the step's observed requests.
            like: [any, num_query_heads, head_size] tensor of the queries' type.
        """
        self._in_step, self._queries = {}, None
        tokens, rows = self._buffer_rows(observations)
        self._reserve(like)
        buffers = self.buffers
        assert buffers is not None
        assert self._layer_bytes is not None
        num_heads, row_bytes = buffers.shape[3], buffers.stride(3) * buffers.itemsize
        heads = rows[:, None] * num_heads + np.arange(num_heads)
        return QueryAddresses(tokens, buffers.data_ptr() + heads * row_bytes, self._layer_bytes)

    def _buffer_rows(self, observations: list[ObservedRequest]) -> tuple[Integers, Integers]:
        """Returns [T] rows of the batch and [T] rows of a layer's ring buffers."""
        tokens, index, positions = observed_tokens(observations)
        slots = np.array([self._slot(request_id) for request_id, _, _ in observations])[index]
        return tokens, slots * self.window_size + positions % self.window_size

    def record(self, layer: int, queries: QueryRows, observed: ObservedQueries) -> None:
        """Copies observed rows of [num_tokens, num_query_heads, head_size] into ring buffers.

        Windows that lie in the step are not copied: they are read from `queries` until the next
        layer is recorded.
        """
        self._in_step, self._queries = observed.in_step, queries if observed.in_step else None
        if observed.tokens.numel():
            rows = queries[observed.tokens]
            self._reserve(rows)
            self._layers[layer][observed.rows] = rows

    def find(self, windows: Sequence[tuple[str, int]], num_queries: int) -> WindowRows:
        """Finds windows that lie either all in the step or all in ring buffers.

        Args:
            windows: request id, and the position at which the window ends (exclusive).
            num_queries: queries of each window.
        """
        steps = np.arange(num_queries)[:, None]
        if in_step := windows[0][0] in self._in_step:
            rows = np.array([self._in_step[request_id].start for request_id, _ in windows]) + steps
        else:
            slots, ends = np.array([(self.slots[each], end) for each, end in windows]).T
            rows = slots * self.window_size + (ends - num_queries + steps) % self.window_size
        return WindowRows(upload(rows, self.device), in_step)

    def read(self, layer: int, windows: WindowRows) -> Tensor:
        """Returns the [num_queries, R, num_query_heads, head_size] queries of a layer."""
        if windows.in_step:
            assert self._queries is not None
            queries = self._queries[windows.rows.flatten()]
            return queries.unflatten(0, windows.rows.shape)
        return self._layers[layer][windows.rows]

    def end_event(self, request_id: str) -> None:
        """Frees a request's ring buffer until its next event comes near."""
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Frees a request's ring buffer; unknown requests are ignored."""
        if request_id in self._in_step:
            self._in_step, self._queries = {}, None
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)

    def _slot(self, request_id: str) -> int:
        if request_id not in self.slots:
            free = self._free_slots
            self.slots[request_id] = free.pop() if free else len(self.slots)
        return self.slots[request_id]

    def _reserve(self, queries: Tensor) -> None:
        """Grows the buffers to hold every slot handed out."""
        have = 0 if self.buffers is None else self.buffers.shape[1]
        need = len(self.slots) + len(self._free_slots)
        if need <= have:
            return
        num_buffers = max(self.num_buffers, ceil_div(need, 8) * 8)
        size = (self.num_layers, num_buffers, self.window_size, *queries.shape[1:])
        buffers = queries.new_zeros(size)
        if self.buffers is not None:
            buffers[:, :have] = self.buffers
        self.buffers, self._layers = buffers, buffers.flatten(1, 2).unbind()
        layers = np.arange(self.num_layers) * (buffers.stride(0) * buffers.itemsize)
        self._layer_bytes = upload(layers, self.device)


def window_blocks(
    window_size: int, num_query_heads: int, num_kv_heads: int, queries_per_page: int
) -> int:
    """Returns how many blocks hold a request's last queries."""
    return ceil_div(ceil_div(window_size * num_query_heads, queries_per_page), num_kv_heads)


class PagedWindows:
    """Ring buffers in blocks that the scheduler hands out; same interface as `QueryWindows`.

    Place p of a ring buffer holds query head q in row p * num_query_heads + q of the layer's
    pages, as many rows of head_size to a page as fit. Every window goes into its ring buffer.
    Rows are counted in steps that divide both a row and a page, which may have room left over.

    Args:
        pool: pages of the cache group.
        window_size: queries per ring buffer.
        num_query_heads: query heads of this rank.
    """

    def __init__(self, pool: PagePool, window_size: int, num_query_heads: int) -> None:
        self.window_size = window_size
        self._pool = pool
        self._num_query_heads = num_query_heads
        pages = pool.pages.view(pool.dtype)
        step = math.gcd(pages.shape[1], pool.head_size)
        self._page_steps, self._row_steps = pages.shape[1] // step, pool.head_size // step
        self._layer_rows = (pool.layer_offsets * self._page_steps).unbind()
        self._layer_bytes = pool.layer_offsets * pool.page_bytes
        self._rows = pages.flatten().unfold(0, pool.head_size, step)
        # By request id, the first row of each page of its ring buffer, before a layer's offset.
        self._pages: dict[str, Integers] = {}

    def hold(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Assigns a request the blocks of its ring buffer."""
        pool = self._pool
        pages = np.array(block_ids)[:, None] * pool.pages_per_block + np.arange(pool.num_heads)
        self._pages[request_id] = pages.flatten() * self._page_steps

    def locate(
        self, observations: list[ObservedRequest], events: Sequence[EventPlan] = ()
    ) -> ObservedQueries:
        tokens, rows = self._buffer_rows(observations)
        return ObservedQueries(upload(tokens, self._pool.device), upload(rows, self._pool.device))

    def addresses(self, observations: list[ObservedRequest], like: Tensor) -> QueryAddresses:
        tokens, rows = self._buffer_rows(observations)
        row_bytes = self._rows.stride(0) * self._rows.itemsize
        return QueryAddresses(tokens, self._rows.data_ptr() + rows * row_bytes, self._layer_bytes)

    def _buffer_rows(self, observations: list[ObservedRequest]) -> tuple[Integers, Integers]:
        """Returns [T] rows of the batch and [T, num_query_heads] rows before a layer's offset."""
        tokens, index, positions = observed_tokens(observations)
        pages = np.stack([self._pages[request_id] for request_id, _, _ in observations])
        return tokens, self._rows_at(pages[index], positions)

    def _rows_at(self, pages: Integers, positions: Integers) -> Integers:
        """Returns [T, num_query_heads] rows of the queries at [T] positions of requests.

        Args:
            pages: [T or 1, P] first rows of the pages of each request's ring buffer.
            positions: [T] positions in the requests.
        """
        heads = np.arange(self._num_query_heads)
        places = (positions % self.window_size)[:, None] * self._num_query_heads + heads
        in_page = self._pool.queries_per_page
        index = np.arange(len(pages))[:, None]
        rows: Integers = pages[index, places // in_page] + places % in_page * self._row_steps
        return rows

    def record(self, layer: int, queries: QueryRows, observed: ObservedQueries) -> None:
        rows = self._rows
        rows[observed.rows + self._layer_rows[layer]] = queries[observed.tokens].to(rows.dtype)

    def find(self, windows: Sequence[tuple[str, int]], num_queries: int) -> WindowRows:
        rows = [
            self._rows_at(self._pages[request_id][None], np.arange(end - num_queries, end))
            for request_id, end in windows
        ]
        return WindowRows(upload(np.stack(rows, axis=1), self._pool.device), in_step=False)

    def read(self, layer: int, windows: WindowRows) -> Tensor:
        return self._rows[windows.rows + self._layer_rows[layer]]

    def end_event(self, request_id: str) -> None:
        """Keeps the ring buffer: the next event may come at any token."""

    def release(self, request_id: str) -> None:
        self._pages.pop(request_id, None)


Windows = QueryWindows | PagedWindows
