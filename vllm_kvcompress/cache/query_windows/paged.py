"""The last queries of running requests, in blocks of the requests' own.

Under the pressure trigger any request may be compressed at any token, so all of them keep their
last queries, as long as they run. They lie in the block pool, where vLLM's allocator counts them:

    place p of a ring, query head q  ->  row p * num_query_heads + q of the layer's ring pages,
                                         as many rows of head_size to a page as fit
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.query_windows.rings import (
    Destinations,
    Located,
    Numbers,
    WindowPlaces,
    lay_out,
)
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.scheduling.plan import EventPlan, Observation


def window_blocks(
    window_size: int, num_query_heads: int, num_kv_heads: int, queries_per_page: int
) -> int:
    """Blocks that a request's last queries take."""
    pages = math.ceil(window_size * num_query_heads / queries_per_page)
    return math.ceil(pages / num_kv_heads)


class PagedWindows:
    """As `QueryWindows`, with rings in blocks that the scheduler hands out.

    Args:
        pool: the pages.
        window_size: queries per ring.
        num_query_heads: of this rank.
    """

    def __init__(self, pool: PagePool, window_size: int, num_query_heads: int) -> None:
        self.window_size = window_size
        self._pool = pool
        self._num_query_heads = num_query_heads
        layer_rows = pool.layer_offsets * pool.queries_per_page
        self._layer_rows = layer_rows.unbind()
        self._layer_bytes = pool.layer_offsets * pool.page_bytes
        self._rows = pool.pages.view(pool.dtype).view(-1, pool.head_size)
        # By request the first row of each of its ring's pages, before a layer's offset.
        self._pages: dict[str, Numbers] = {}

    def hold(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Takes the blocks that a request's ring lies in."""
        pool = self._pool
        pages = np.array(block_ids)[:, None] * pool.pages_per_block + np.arange(pool.num_heads)
        self._pages[request_id] = pages.flatten() * pool.queries_per_page

    def locate(
        self, rows: list[tuple[str, int, Observation]], events: Sequence[EventPlan] = ()
    ) -> Located:
        """As `QueryWindows.locate`. Whole windows go into their rings as well, which go on."""
        tokens, places = self._located(rows)
        device = self._pool.device
        return Located(upload(tokens, device), upload(places, device))

    def destinations(self, rows: list[tuple[str, int, Observation]], like: Tensor) -> Destinations:
        """As `QueryWindows.destinations`."""
        tokens, places = self._located(rows)
        memory = self._rows
        row_bytes = memory.stride(0) * memory.itemsize
        return Destinations(tokens, memory.data_ptr() + places * row_bytes, self._layer_bytes)

    def _located(self, rows: list[tuple[str, int, Observation]]) -> tuple[Numbers, Numbers]:
        """[T] places in the batch, and [T, num_query_heads] rows before a layer's offset."""
        tokens, row, positions = lay_out(rows)
        pages = np.stack([self._pages[request_id] for request_id, _, _ in rows])
        return tokens, self._places(pages[row], positions)

    def record(self, layer: int, queries: Tensor, where: Located) -> None:
        """Copies observed rows of [num_tokens, num_query_heads, head_size] into the rings."""
        rows = self._rows
        rows[where.places + self._layer_rows[layer]] = queries[where.tokens].to(rows.dtype)

    def is_whole(self, request_id: str) -> bool:
        """Never: every window is in a ring."""
        return False

    def find(self, windows: Sequence[tuple[str, int]], num_queries: int) -> WindowPlaces:
        """As `QueryWindows.find`."""
        found = [
            self._places(self._pages[request_id][None], np.arange(end - num_queries, end))
            for request_id, end in windows
        ]
        return WindowPlaces(upload(np.stack(found, axis=1), self._pool.device), False)

    def read(self, layer: int, where: WindowPlaces) -> Tensor:
        """As `QueryWindows.read`."""
        return self._rows[where.rows + self._layer_rows[layer]]

    def _places(self, pages: Numbers, positions: Numbers) -> Numbers:
        """[T, num_query_heads] rows of the queries of [T] positions, before a layer's offset.

        Args:
            pages: [T or 1, P] first rows of the pages of each one's ring.
            positions: [T] in the request.
        """
        heads = np.arange(self._num_query_heads)
        places = (positions % self.window_size)[:, None] * self._num_query_heads + heads
        nth = np.arange(len(pages))[:, None]
        in_page = self._pool.queries_per_page
        found: Numbers = pages[nth, places // in_page] + places % in_page
        return found

    def end_event(self, request_id: str) -> None:
        """The ring goes on: the next event may come at any token."""

    def release(self, request_id: str) -> None:
        """Forgets a request's ring; unknown requests are ignored."""
        self._pages.pop(request_id, None)
