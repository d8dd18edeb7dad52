"""The minimum and maximum of every page's keys, for choosing which pages a decode step reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.page_choice import key_bounds, rounded_outwards

_SCALE = torch.float32


class PageBounds:
    """Bounds of all pages of a pool, made once when a page has become full.

    They are found by page, whoever holds it: prefixes that requests share are shared here, too,
    and what the prefix cache keeps stays known.

    Args:
        pool: the pages.
        rounded: to int8.
        others: of other cache groups. Groups take blocks from one cache, so those with the same
            pages share one array.

    Attributes:
        pool: the pages.
        bounds: [num_pages, 2 * head_size] minimum and maximum of the keys, by page.
        scales: [num_pages] fp32, of bounds that are rounded outwards to int8; None: in the cache's
            own numbers they are exact.
    """

    bounds: Tensor
    scales: Tensor | None

    def __init__(
        self, pool: PagePool, rounded: bool = False, others: Iterable[PageBounds] = ()
    ) -> None:
        self.pool = pool
        for other in others:
            if other.pool.pages.is_set_to(pool.pages):
                self.bounds, self.scales = other.bounds, other.scales
                return
        num_pages, device = pool.pages.shape[0], pool.device
        dtype = torch.int8 if rounded else pool.pages.dtype
        self.bounds = torch.zeros((num_pages, 2 * pool.head_size), dtype=dtype, device=device)
        self.scales = torch.ones(num_pages, dtype=_SCALE, device=device) if rounded else None

    def fill_blocks(self, layer: int, block_ids: Tensor) -> None:
        """Reads the pages of one layer in [N] int64 blocks that have just become full."""
        self.fill(self.pool.layer_page_ids(layer, block_ids).flatten())

    def fill(self, page_ids: Tensor) -> None:
        """Reads [P] int64 full pages."""
        found = key_bounds(self.pool.keys(page_ids))
        if self.scales is not None:
            found, self.scales[page_ids] = rounded_outwards(found)
        self.bounds[page_ids] = found


def bytes_beside(
    pool_bytes: int, block_size: int, head_size: int, dtype: torch.dtype, rounded: bool
) -> int:
    """Bytes of `pool_bytes` for pages and bounds together that the bounds take.

    Args:
        pool_bytes: of both.
        block_size, head_size, dtype: of the pages, each so many keys and values.
        rounded: the bounds, two keys, are int8 and have a scale.
    """
    vector = int(head_size * dtype.itemsize)
    bounds = 2 * head_size + int(_SCALE.itemsize) if rounded else 2 * vector
    return pool_bytes * bounds // (2 * block_size * vector + bounds)
