"""The last queries of running requests, in blocks of the requests' own.

Under the pressure trigger any request may be compressed at any token, so all of them keep their
last queries, as long as they run. They lie in the block pool, where vLLM's allocator counts them:

    place p of a ring, query head q  ->  row p * num_query_heads + q of the layer's ring pages,
                                         2 * block_size rows of head_size to a page
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_kvcompress.ledger import Observation
from vllm_kvcompress.pages import PagePool
from vllm_kvcompress.query_windows import Located, lay_out


def window_blocks(
    window_size: int, num_query_heads: int, num_kv_heads: int, block_size: int
) -> int:
    """Blocks that a request's last queries take."""
    pages = math.ceil(window_size * num_query_heads / (2 * block_size))
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
        self._heads = torch.arange(num_query_heads)
        offsets = pool.layer_offsets - pool.layer_offsets[0]
        self._layer_rows: list[int] = (offsets * self._rows_per_page).tolist()
        # By request the first row of each of its ring's pages, in the first layer.
        self._pages: dict[str, Tensor] = {}

    @property
    def _rows(self) -> Tensor:
        """[all rows, head_size] view of the pool."""
        return self._pool.pages.view(-1, self._pool.head_size)

    @property
    def _rows_per_page(self) -> int:
        return 2 * self._pool.block_size

    def hold(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Takes the blocks that a request's ring lies in."""
        heads = torch.arange(self._pool.num_heads)
        first = torch.tensor(block_ids)[:, None] * self._pool.pages_per_block
        pages = (first + self._pool.layer_offsets[0] + heads).flatten()
        self._pages[request_id] = pages * self._rows_per_page

    def locate(self, rows: list[tuple[str, int, Observation]]) -> Located:
        """Where this step's observed queries come from and go to; as `QueryWindows.locate`."""
        tokens, row, positions = lay_out(rows)
        places = (positions % self.window_size)[:, None] * len(self._heads) + self._heads
        pages = torch.stack([self._pages[request_id] for request_id, _, _ in rows])
        firsts = pages[row].gather(1, places // self._rows_per_page)
        return Located(tokens, firsts + places % self._rows_per_page)

    def record(self, layer: int, queries: Tensor, where: Located) -> None:
        """Copies observed rows of [num_tokens, num_query_heads, head_size] into the rings."""
        rows = self._rows
        rows[where.places + self._layer_rows[layer]] = queries[where.tokens].to(rows.dtype)

    def read(self, layer: int, request_id: str, position: int, num_queries: int) -> Tensor:
        """[num_queries, num_query_heads, head_size]: the last queries before `position`."""
        positions = torch.arange(position - num_queries, position)
        places = (positions % self.window_size)[:, None] * len(self._heads) + self._heads
        firsts = self._pages[request_id][places // self._rows_per_page]
        return self._rows[firsts + places % self._rows_per_page + self._layer_rows[layer]]

    def end_event(self, request_id: str) -> None:
        """The ring goes on: the next event may come at any token."""

    def release(self, request_id: str) -> None:
        """Forgets a request's ring; unknown requests are ignored."""
        self._pages.pop(request_id, None)
