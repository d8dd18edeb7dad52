"""Numbers of tokens that depend on their keys or values alone, remembered by page.

A turn of a conversation finds its history in the prefix cache, so the event of the turn before has
read most of its pages. What they hold stays the same until their block is given to a request for
other tokens, or an event writes kept tokens to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class PageNumbers:
    """One fp32 number per token of every page, such as the norm of its value, in host memory.

    The memory is taken at the first use.

    Args:
        num_pages: pages of the pool.
        block_size: tokens of a page.
    """

    def __init__(self, num_pages: int, block_size: int) -> None:
        self._shape = (num_pages, block_size)
        self._numbers: Tensor | None = None
        self._known = torch.zeros(num_pages, dtype=torch.bool)

    def read(self, page_table: Tensor, counts: Tensor, compute: Callable[[int], Tensor]) -> Tensor:
        """Returns the [H, width * block_size] numbers of heads' full pages; others are arbitrary.

        Args:
            page_table: [H, width] int64 page ids; arbitrary behind a head's last page.
            counts: [H] pages of each head.
            compute: returns the [H, n] numbers of all columns from a given one on.
        """
        if self._numbers is None:
            self._numbers = torch.zeros(self._shape)
        held = torch.arange(page_table.shape[1]) < counts[:, None]
        unknown = (held & ~self._known[page_table]).any(dim=0).nonzero()
        if len(unknown):
            first = int(unknown[0])
            pages, held = page_table[:, first:], held[:, first:]
            numbers = compute(first).unflatten(1, (pages.shape[1], -1))
            self._numbers[pages[held]] = numbers[held]
            self._known[pages[held]] = True
        return self._numbers[page_table].flatten(1)

    def forget(self, page_ids: Tensor) -> None:
        """Forgets pages that are written to."""
        self._known[page_ids] = False

    def forget_all(self) -> None:
        """Forgets all pages, because what the numbers follow from has changed."""
        self._known.zero_()
