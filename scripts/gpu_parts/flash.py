"""vLLM's FlashAttention, called as compressed requests call it, against our twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries


def why_no_flash() -> str | None:
    """Why vLLM's FlashAttention cannot be had here, as a sentence; None where it can."""
    try:
        flash_attention()
    except Exception as error:  # of a vLLM for another platform, or none
        return f"no comparison with FlashAttention: {type(error).__name__}: {error}"
    return None


def flash_attention() -> tuple[Callable[..., Tensor], int]:
    """vLLM's function, and the version that it takes on this GPU.

    Raises:
        ImportError: this vLLM has none.
    """
    from vllm.v1.attention.backends import fa_utils

    if not fa_utils.is_flash_attn_varlen_func_available():
        raise ImportError("vLLM was built without FlashAttention")
    return fa_utils.flash_attn_varlen_func, fa_utils.get_flash_attn_version() or 2


def attend_per_head(
    flash: Callable[..., Any], version: int, entries: PagedEntries, queries: Tensor, scale: float
) -> Tensor:
    """Every sequence's last query, over the flat array of pages as a cache of one KV head.

    Args:
        flash: vLLM's `flash_attn_varlen_func`.
        version: of FlashAttention.
        entries: pages and lengths of S sequences.
        queries: [S, G, head_size].
        scale: of logits.

    Returns:
        [S, G, head_size].
    """
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    cache = entries.pages.view(-1, entries.block_size, 1, 2 * entries.head_size)
    keys, values = map(canonicalize_singleton_dim_strides, cache.split(entries.head_size, dim=-1))
    starts = torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device)
    output = torch.empty_like(queries)
    flash(
        q=queries,
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=entries.flat_lengths,
        max_seqlen_k=entries.capacity,
        softmax_scale=scale,
        causal=True,
        block_table=entries.page_table,
        fa_version=version,
    )
    return output
