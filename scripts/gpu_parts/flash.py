"""vLLM's FlashAttention over the same pages: as compressed requests call it, and as whole ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries

Launch = Callable[[], Tensor]


def why_no_flash() -> str | None:
    """Returns why vLLM's FlashAttention cannot be used here; None if it can."""
    try:
        flash_attention()
    except Exception as error:  # of a vLLM for another platform, or none
        return f"no comparison with FlashAttention: {type(error).__name__}: {error}"
    return None


def flash_attention() -> tuple[Callable[..., Any], int]:
    """vLLM's function for this GPU, and the version of FlashAttention that it is given.

    Raises:
        ImportError: this vLLM has none.
    """
    from vllm.v1.attention.backends import fa_utils

    if not fa_utils.is_flash_attn_varlen_func_available():
        raise ImportError("vLLM was built without FlashAttention")
    version = fa_utils.get_flash_attn_version() or 2
    return functools.partial(fa_utils.flash_attn_varlen_func, fa_version=version), version


def attention_per_head(
    flash: Callable[..., Any], entries: PagedEntries, queries: Tensor, scale: float
) -> Launch:
    """A launch over the flat array of pages as a cache of one KV head.

    The last m entries of every sequence are the queries' own, and attention is causal among these.

    Args:
        flash: as `flash_attention` returns it.
        entries: pages and lengths of S sequences.
        queries: [S, m, G, head_size] contiguous.
        scale: of logits.

    Returns:
        What launches it, and returns [S, m, G, head_size].
    """
    cache = entries.pages.view(-1, entries.block_size, 1, 2 * entries.head_size)
    rows = queries.flatten(0, 1)
    lengths, table = entries.flat_lengths, entries.page_table
    launch = _launch(flash, cache, rows, lengths, table, entries.capacity, scale)
    return lambda: launch().view_as(queries)


def attention_of_requests(
    flash: Callable[..., Any], entries: PagedEntries, queries: Tensor, scale: float, num_heads: int
) -> Launch:
    """A launch over whole requests, as vLLM attends for those that are not compressed.

    Args:
        flash: as `flash_attention` returns it.
        entries: of S = requests * num_heads sequences, a request's heads one after the other, of
            one length each, in blocks of `num_heads` successive pages.
        queries: [S, G, head_size] contiguous, each of a sequence's last token.
        scale: of logits.
        num_heads: KV heads.

    Returns:
        What launches it, and returns [S, G, head_size].
    """
    rows = 2 * entries.head_size
    blocks = entries.pages.view(-1, num_heads, entries.block_size, rows).transpose(1, 2)
    by_request = queries.view(-1, num_heads * queries.shape[1], entries.head_size)
    lengths = entries.flat_lengths[::num_heads].contiguous()
    table = entries.page_table[::num_heads] // num_heads
    launch = _launch(flash, blocks, by_request, lengths, table, entries.capacity, scale)
    return lambda: launch().view_as(queries)


def _launch(
    flash: Callable[..., Any],
    cache: Tensor,
    rows: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    longest: int,
    scale: float,
) -> Launch:
    """Args: [blocks, block_size, heads, 2D], [n, query heads, D], [s], [s, blocks of one]."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    halves = cache.split(rows.shape[-1], dim=-1)
    keys, values = map(canonicalize_singleton_dim_strides, halves)
    each = len(rows) // len(lengths)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=rows.device) * each
    output = torch.empty_like(rows)

    def launch() -> Tensor:
        flash(
            q=rows,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=starts,
            max_seqlen_q=each,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            block_table=block_table,
        )
        return output

    return launch
