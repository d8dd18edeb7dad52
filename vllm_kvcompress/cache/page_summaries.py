"""Summaries of the keys of every page, by which decode steps choose the pages that they read."""

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
    """Form of a page's summary.

    Attributes:
        num_means: number of equal parts of the page whose mean keys are stored; 0: the minimum
            and maximum of the keys are stored.
        rounded: whether minimum and maximum are rounded outwards to int8 with a scale.
    """

    num_means: int = 0
    rounded: bool = False

    @property
    def num_vectors(self) -> int:
        """Number of vectors of head_size elements per page."""
        return self.num_means or 2

    def share(self, num_bytes: int, page_bytes: int, head_size: int, dtype: torch.dtype) -> int:
        """Returns how many of the bytes that pages, of `page_bytes` and with keys of the given size
        and type, share with their summaries go to these."""
        numbers = self.num_vectors * head_size
        own = numbers + int(_SCALE.itemsize) if self.rounded else numbers * int(dtype.itemsize)
        return num_bytes * own // (page_bytes + own)


class PageSummaries:
    """Summaries of all pages of a pool, made once when a page is full.

    They are indexed by page: requests that share a prefix share its summaries, and pages in the
    prefix cache keep theirs.

    Args:
        others: summaries of other cache groups. Groups take blocks from one cache, so those with
            the same pages share one array.

    Attributes:
        pool: the pages.
        kind: form of the summaries.
        vectors: [num_pages, num_vectors * head_size] vectors of each page.
        scales: [num_pages] fp32 scales of rounded bounds; None if vectors have the keys' type.
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
        """Summarises one layer's pages of [N] int64 blocks that have just become full."""
        self.fill(layer, self.pool.layer_page_ids(layer, block_ids).flatten())

    def fill(self, layer: int, page_ids: Tensor) -> None:
        """Summarises [P] int64 full pages of a layer's heads."""
        keys, num_means = self.pool.keys(page_ids, layer), self.kind.num_means
        vectors = key_means(keys, num_means) if num_means else key_bounds(keys)
        if self.scales is not None:
            vectors, self.scales[page_ids] = rounded_outwards(vectors)
        self.vectors[page_ids] = vectors
