"""Events in place: kept tokens fill the holes that evicted ones leave.

    before   [ a x b ][ c d x ] | [ e f x ]    x: evicted; the pages behind | are given back
    after    [ a e b ][ c d f ]                e and f have moved

So an event moves about as many tokens as it evicts, and not all that it keeps. Entries are no
longer in position order then, which the policy has to allow (`Pipeline.any_order`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import Selection


class FilledHoles(NamedTuple):
    """What is kept in place.

    Attributes:
        selection: kept entries in the order of their places afterwards.
        pages: [P] int64 pages of the heads, head after head; P of the selection.
        moved: [M] int64 places, of [P * block_size], that get a token from elsewhere.
    """

    selection: Selection
    pages: Tensor
    moved: Tensor


def fill_holes(
    selection: Selection, page_table: Tensor, held: Tensor, block_size: int
) -> FilledHoles:
    """Gives every kept entry its place. A head that grows takes pages that others give up.

    Args:
        selection: kept entries in position order; a request keeps as many pages as it `held`.
        page_table: [H, width] int64 pages: those of former kept tokens, then those to give back.
        held: [H] int64 pages of former kept tokens.
        block_size: tokens of a page.
    """
    counts, kept = selection.page_counts, selection.kept_indices
    heads = selection.heads(block_size)
    stays = kept < (torch.minimum(held, counts) * block_size)[heads]
    first_places = (counts.cumsum(0) - counts) * block_size
    order = torch.full_like(kept, -1)
    order[(first_places[heads] + kept)[stays]] = kept[stays]
    moved = (order < 0).nonzero()[:, 0]
    order[moved] = kept[~stays]  # as many of each head as it has holes
    columns = torch.arange(page_table.shape[1], device=page_table.device)
    before, after = (columns < each[:, None] for each in (held, counts))
    pages = page_table.clone()
    pages[after & ~before] = page_table[before & ~after]  # as many in each request
    return FilledHoles(replace(selection, kept_indices=order), pages[after], moved)
