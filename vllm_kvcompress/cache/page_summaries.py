"""Summaries of every page's keys, for choosing which pages a decode step reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.page_choice import key_bounds, key_means, rounded_outwards

_SCALE = torch.float32


@dataclass(frozen=True)
class SummaryKind:
    """What is remembered of a page's keys.

    Attributes:
        num_means: the means of so many parts of the page; 0: the keys' minimum and maximum.
        rounded: minimum and maximum, outwards to int8, with a scale.
    """

    num_means: int = 0
    rounded: bool = False

    @property
    def num_vectors(self) -> int:
        """As long as keys are."""
        return self.num_means or 2

    def page_bytes(self, head_size: int, dtype: torch.dtype) -> int:
        """Of one page's, whose keys are of that type."""
        numbers = self.num_vectors * head_size
        return numbers + int(_SCALE.itemsize) if self.rounded else numbers * int(dtype.itemsize)


class PageSummaries:
    """Of all pages of a pool, made once when a page has become full.

    They are found by page, whoever holds it: prefixes that requests share are shared here, too,
    and what the prefix cache keeps stays known.

    Args:
        pool, kind: as below.
        others: of other cache groups. Groups take blocks from one cache, so those with the same
            pages share one array.

    Attributes:
        pool: the pages.
        kind: what is remembered of them.
        vectors: [num_pages, num_vectors * head_size] by page.
        scales: [num_pages] fp32 of rounded bounds; None: vectors are in the keys' own type.
    """

    vectors: Tensor
    scales: Tensor | None

    def __init__(
        self, pool: PagePool, kind: SummaryKind, others: Iterable[PageSummaries] = ()
    ) -> None:
        self.pool, self.kind = pool, kind
        for other in others:
            if other.pool.pages.is_set_to(pool.pages):
                self.vectors, self.scales = other.vectors, other.scales
                return
        num_pages, device, rounded = pool.pages.shape[0], pool.device, kind.rounded
        dtype = torch.int8 if rounded else pool.dtype
        shape = (num_pages, kind.num_vectors * pool.head_size)
        self.vectors = torch.zeros(shape, dtype=dtype, device=device)
        self.scales = torch.ones(num_pages, dtype=_SCALE, device=device) if rounded else None

    def fill_blocks(self, layer: int, block_ids: Tensor) -> None:
        """Reads the pages of one layer in [N] int64 blocks that have just become full."""
        self.fill(layer, self.pool.layer_page_ids(layer, block_ids).flatten())

    def fill(self, layer: int, page_ids: Tensor) -> None:
        """Reads [P] int64 full pages of a layer's heads."""
        keys, kind = self.pool.keys(page_ids, layer), self.kind
        found = key_means(keys, kind.num_means) if kind.num_means else key_bounds(keys)
        if self.scales is not None:
            found, self.scales[page_ids] = rounded_outwards(found)
        self.vectors[page_ids] = found


def bytes_beside(
    pool_bytes: int, page_bytes: int, head_size: int, dtype: torch.dtype, kind: SummaryKind
) -> int:
    """Bytes of `pool_bytes` for pages and summaries together that the summaries take.

    Args:
        pool_bytes: of both.
        page_bytes: of a page.
        head_size, dtype: of a key.
        kind: of the summaries.
    """
    beside = kind.page_bytes(head_size, dtype)
    return pool_bytes * beside // (page_bytes + beside)
