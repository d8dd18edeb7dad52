"""Norms of values after the output projection (CriticalKV), remembered by page.

A turn of a conversation finds its history in the prefix cache, so the event of the turn before has
read most of its pages. What they hold stays the same until their block is given to a request for
other tokens, or an event writes kept tokens to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PageNorms:
    """One fp32 norm for each token of every page, in host memory that is taken at the first use.

    Args:
        num_pages: pages of the pool.
        block_size: tokens of a page.
    """

    def __init__(self, num_pages: int, block_size: int) -> None:
        self._shape = (num_pages, block_size)
        self._norms: Tensor | None = None
        self._known = torch.zeros(num_pages, dtype=torch.bool)

    def read(self, page_table: Tensor, counts: Tensor, compute: Callable[[int], Tensor]) -> Tensor:
        """Returns the [H, width * block_size] norms of heads' full pages; others are arbitrary.

        Args:
            page_table: [H, width] int64 page ids; arbitrary behind a head's last page.
            counts: [H] pages of each head.
            compute: returns the [H, n] norms of all columns of pages from a given column on.
        """
        if self._norms is None:
            self._norms = torch.zeros(self._shape)
        held = torch.arange(page_table.shape[1]) < counts[:, None]
        unknown = (held & ~self._known[page_table]).any(dim=0).nonzero()
        if len(unknown):
            first = int(unknown[0])
            pages, held = page_table[:, first:], held[:, first:]
            norms = compute(first).unflatten(1, (pages.shape[1], -1))
            self._norms[pages[held]] = norms[held]
            self._known[pages[held]] = True
        return self._norms[page_table].flatten(1)

    def forget(self, page_ids: Tensor) -> None:
        """Forgets pages that are written to."""
        self._known[page_ids] = False

    def forget_all(self) -> None:
        """Forgets all pages, because the output projection or the scales of values have changed."""
        self._known.zero_()
