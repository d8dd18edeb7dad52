"""The minimum and maximum of every page's keys, for choosing which pages a decode step reads."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.page_choice import key_bounds


class PageBounds:
    """Bounds of all pages of a pool, made once when a page has become full.

    They are found by page, whoever holds it: prefixes that requests share are shared here, too,
    and what the prefix cache keeps stays known. In the cache's own numbers they are exact.

    Attributes:
        pool: the pages.
        bounds: [num_pages, 2 * head_size] minimum and maximum of the keys, by page.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.bounds = torch.zeros(
            (pool.pages.shape[0], 2 * pool.head_size), dtype=pool.pages.dtype, device=pool.device
        )

    def fill_blocks(self, layer: int, block_ids: Tensor) -> None:
        """Reads the pages of one layer in [N] int64 blocks that have just become full."""
        pool = self.pool
        heads = torch.arange(pool.num_heads, device=pool.device) + pool.layer_offsets[layer]
        self.fill((block_ids[:, None] * pool.pages_per_block + heads).flatten())

    def fill(self, page_ids: Tensor) -> None:
        """Reads [P] int64 full pages."""
        self.bounds[page_ids] = key_bounds(self.pool.keys(page_ids))


def bytes_beside(pool_bytes: int, block_size: int) -> int:
    """Bytes of `pool_bytes` for pages and bounds together that the bounds take.

    A page's bounds are two keys of its `block_size` keys and values.
    """
    return pool_bytes // (block_size + 1)
