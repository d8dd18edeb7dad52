"""Choosing pages in torch, on any device.

Quest (arXiv 2406.10774, section 3.2): no key of a page has a higher product with a query q than

    bound(q, page) = sum_d max(q_d * low_d, q_d * high_d)

where low and high are the elementwise minimum and maximum of its keys. With q split into its
positive and its negative elements that is one product of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def key_bounds(keys: Tensor) -> Tensor:
    """[P, block_size, head_size] keys of pages -> [P, 2 * head_size] their minimum and maximum."""
    return torch.cat(keys.aminmax(dim=1), dim=-1)


def choose_pages(
    queries: Tensor,
    bounds: Tensor,
    page_table: Tensor,
    num_pages: Tensor,
    num_read: Tensor,
    most: int,
    group: str = "max",
) -> Tensor:
    """The pages that sequences read: their last one, and those with the highest bounds.

    Args:
        queries: [S, G, head_size] of the query heads that share a sequence's KV head.
        bounds: [any, 2 * head_size] of every page, as `key_bounds` gives them.
        page_table: [S, W] page ids.
        num_pages: [S] pages of each sequence, at least 1.
        num_read: [S] how many it reads, from 1 to `num_pages`.
        most: columns of what is returned, at least the highest of `num_read`.
        group: max or mean of the bounds of a sequence's query heads.

    Returns:
        [S, most] int32 page ids in the order of the tokens; what is behind `num_read` is some page.
    """
    num_sequences, width = page_table.shape
    lows_and_highs = bounds[page_table.flatten().to(torch.int64)].view(num_sequences, width, -1)
    signs = torch.cat((queries.clamp(max=0), queries.clamp(min=0)), dim=-1)
    found = torch.bmm(signs.to(bounds.dtype), lows_and_highs.transpose(1, 2)).float()
    scores = found.amax(1) if group == "max" else found.mean(1)
    columns = torch.arange(width, device=scores.device)
    last = num_pages[:, None] - 1
    scores = scores.masked_fill(columns == last, torch.inf).masked_fill_(columns > last, -torch.inf)
    best = scores.topk(most, dim=1).indices
    behind = torch.arange(most, device=scores.device) >= num_read[:, None]
    in_order = best.masked_fill(behind, width).sort(dim=1).values.clamp(max=width - 1)
    return page_table.gather(1, in_order).to(torch.int32)
