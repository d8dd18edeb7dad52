"""Choice of pages by summaries of their keys, in plain torch.

The product of a query q with the mean of some keys is the mean of its products with them. A page
cut into parts counts with its best part, so that a key unlike the others is seen.

Quest (arXiv 2406.10774, section 3.2): no key of a page has a higher product with a query q than

    bound(q, page) = sum_d max(q_d * low_d, q_d * high_d)

where low and high are the elementwise minimum and maximum of its keys. With q split into its
positive and its negative elements that is one product of matrices. ReAttention (arXiv 2407.15176)
looks at the products themselves, for which all keys would have to be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.top_entries import top_entries

QUERIES_AT_ONCE = 256  # of a sequence; a chunk of a prompt has more
_MAX_INT8 = 127  # -128 is not used
_MANTISSA_BITS, _BIAS, _MIN_EXPONENT = 23, 127, -126  # of fp32


@dataclass(frozen=True)
class Choice:
    """Rules by which pages are chosen.

    Attributes:
        most: columns of the result, at least the highest number of pages that are read.
        num_first, num_last: pages at the beginning and the end (at least 1) that are always read.
        num_means: parts of a page whose means are its summary; 0: summaries are bounds.
    """

    most: int
    num_first: int = 0
    num_last: int = 1
    num_means: int = 0


class PageLists(NamedTuple):
    """Pages of S sequences, of which some are chosen.

    Attributes:
        page_table: [S, W] page ids.
        num_pages: [S] pages of each sequence, at least 1.
        num_read: [S] pages that it reads, from 1 to `num_pages`, those always read included.
    """

    page_table: Tensor
    num_pages: Tensor
    num_read: Tensor


def key_bounds(keys: Tensor) -> Tensor:
    """[P, 2 * head_size] minimum and maximum of the [P, block_size, head_size] keys of pages."""
    return torch.cat(keys.aminmax(dim=1), dim=-1)


def key_means(keys: Tensor, num_parts: int) -> Tensor:
    """[P, num_parts * head_size] means of equal parts of the [P, block_size, head_size] keys."""
    return keys.unflatten(1, (num_parts, -1)).mean(dim=2).flatten(1)


def rounded_outwards(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises [P, 2 * head_size] bounds to int8, minima downwards and maxima upwards.

    Returns the bounds and their [P] fp32 scales, powers of two so that nothing else is rounded.
    """
    lows, highs = bounds.float().chunk(2, dim=-1)
    most = torch.maximum(lows.abs(), highs.abs()).amax(-1)
    exponents = (most / _MAX_INT8).frexp().exponent.clamp(min=_MIN_EXPONENT)  # most / 127 is below
    scales = (exponents + _BIAS << _MANTISSA_BITS).view(torch.float32)
    lows, highs = lows / scales[:, None], highs / scales[:, None]
    return torch.cat((lows.floor(), highs.ceil()), dim=-1).to(torch.int8), scales


@by_device("page_choice_triton", "page_choice_numba")
def choose_pages(
    queries: Tensor,
    summaries: Tensor,
    pages: PageLists,
    choice: Choice,
    scales: Tensor | None = None,
) -> Tensor:
    """Chooses the pages that sequences read: their first and last ones, and those with the highest
    bounds on products of any query with their keys, or the highest means of these.

    Args:
        queries: [S, G, head_size] query heads that share a sequence's KV head, of one or several
            tokens.
        summaries: [any, vectors * head_size] summary of every page: `key_means`, or `key_bounds`,
            which may be `rounded_outwards`; as `choice` says.
        pages: pages of each sequence, and how many of them it reads.
        choice: rules; of equally good pages the later ones are read.
        scales: [any] scales of rounded bounds; None: summaries are not rounded.

    Returns:
        [S, most] int32 page ids in the order of the tokens; any pages behind `num_read`.
    """
    num_sequences, width = pages.page_table.shape
    # On CPUs several times faster than summaries[...].
    page_ids = pages.page_table.flatten()
    vectors, num_means = summaries.index_select(0, page_ids), choice.num_means
    factors = summary_factors(queries, choice)
    dtype = summaries.dtype
    if scales is not None:  # a sum of 127s may be more than there is in fp16
        dtype = torch.promote_types(queries.dtype, torch.bfloat16)
    vectors = vectors.view(num_sequences, -1, factors.shape[2]).to(dtype).transpose(1, 2)
    parts = (torch.bmm(some.to(dtype), vectors) for some in factors.split(QUERIES_AT_ONCE, dim=1))
    if num_means > 1:
        parts = (part.unflatten(2, (width, num_means)).amax(3) for part in parts)
    scores = reduce(torch.maximum, (part.amax(1) for part in parts)).float()
    if scales is not None:
        scores *= scales.index_select(0, page_ids).view(num_sequences, width)
    return _best(scores, pages, choice)


def summary_factors(queries: Tensor, choice: Choice) -> Tensor:
    """[S, any, length] factors of each part of a summary: queries, or those of both bounds."""
    if choice.num_means:
        return queries
    return torch.cat((queries.clamp(max=0), queries.clamp(min=0)), dim=-1)


def _best(scores: Tensor, pages: PageLists, choice: Choice) -> Tensor:
    """[S, most] best pages by [S, W] fp32 scores, without waiting for a device."""
    (page_table, num_pages, num_read), most = pages, choice.most
    width = page_table.shape[1]
    columns, count = torch.arange(width, device=scores.device), num_pages[:, None]
    always = (columns < choice.num_first) | (columns >= count - choice.num_last)
    scores = scores.masked_fill(always, torch.inf).masked_fill_(columns >= count, -torch.inf)
    kept = top_entries(scores, columns < count, num_read.to(torch.int64))
    places = torch.where(kept, kept.cumsum(1) - 1, most)
    chosen = page_table.new_zeros((len(page_table), most + 1), dtype=torch.int32)
    return chosen.scatter_(1, places, page_table.to(torch.int32))[:, :most].contiguous()
