"""What vLLM's attention kernels compute, in plain torch, with their calling conventions.

Interpreted, a Triton kernel takes seconds where these take milliseconds, and FlashAttention's runs
on GPUs alone. Only the kernels are replaced; vLLM's backends around them stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    window_size: Sequence[int] | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    chunk_lookback: int = -1,
    alibi_slopes: Tensor | None = None,
    use_alibi_sqrt: bool = False,
    **options: Any,
) -> None:
    """Causal attention of the last queries of every sequence, over its blocks.

    Args:
        q, out: [tokens, query heads, head size].
        k, v: [blocks, block size, KV heads, head size], of any strides.
        cu_seqlens_q: [S + 1] first query of each sequence.
        max_seqlen_q, max_seqlen_k: bounds, which must hold.
        seqused_k: [S] lengths.
        softmax_scale, causal: as they say; only causal attention is asked for.
        block_table: [S, any] block ids.
        window_size: tokens before a query that it attends to, and 0; negative or None: all.
        k_descale, v_descale: [S, KV heads] what keys and values are times, in fp8.
        k_scale_cache, v_scale_cache: [blocks, block size, KV heads] the same for every token, in
            int8 and fp8, of which `k` and `v` have some bytes more than a head's elements.
        sinks: [query heads] logits that take part in the softmax and have no value; None: none.
        mm_prefix_range: [S, any, 2] first and last token of images whose tokens see each other,
            whatever the window; those that begin and end at 0 are padding.
        chunk_lookback: chunks before its own that a query attends to, the window being as long as
            all of them; negative: there are no chunks.
        alibi_slopes: [query heads] times distances, subtracted from logits; None: nothing is.
        use_alibi_sqrt: whether their square roots count.
        options: what does not change a plain causal softmax here.
    """
    assert causal is True
    assert not options.get("softcap")
    assert seqused_k.numel() == cu_seqlens_q.numel() - 1 == block_table.shape[0]
    assert int(cu_seqlens_q[-1]) == q.shape[0] == out.shape[0]
    size, group, scales = k.shape[1], q.shape[1] // k.shape[2], (k_scale_cache, v_scale_cache)
    if k_scale_cache is not None:
        halves = (each[..., : q.shape[2]].float() for each in (k, v))
        k, v = (half * by[..., None] for half, by in zip(halves, scales, strict=True))
    starts = cu_seqlens_q.tolist()
    for s, length in enumerate(seqused_k.tolist()):
        first, last = starts[s], starts[s + 1]
        assert last - first <= max_seqlen_q
        assert length <= max_seqlen_k
        blocks = block_table[s, : math.ceil(length / size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].float() * (1 if by is None else by[s, :, None])
            for cache, by in ((k, k_descale), (v, v_descale))
        )
        queries = q[first:last].float().unflatten(1, (-1, group))
        logits = torch.einsum("qhgd,khd->hgqk", queries, keys) * softmax_scale
        later = torch.ones(last - first, length).triu(length - (last - first) + 1).bool()
        if window_size is not None and window_size[0] >= 0:
            later |= torch.ones_like(later).tril(length - (last - first) - 1 - window_size[0])
        if window_size is not None and chunk_lookback >= 0:
            chunk = torch.arange(length) // ((window_size[0] + 1) // (chunk_lookback + 1))
            later |= chunk[length - (last - first) :, None] - chunk > chunk_lookback
        if mm_prefix_range is not None:
            assert len(mm_prefix_range) == seqused_k.numel()
            positions, num_computed = torch.arange(length), length - (last - first)
            for begin, end in mm_prefix_range[s].tolist():
                inside = (positions >= begin) & (positions <= end) & (begin < end)
                later &= ~(inside[num_computed:, None] & inside)
        if alibi_slopes is not None:
            own = torch.arange(length - (last - first), length)
            apart = (own[:, None] - torch.arange(length)).clamp_min(0).float()
            apart = apart.sqrt() if use_alibi_sqrt else apart
            logits -= alibi_slopes.view(-1, group, 1, 1) * apart
        logits = logits.masked_fill(later, -torch.inf)
        if sinks is not None:
            added = sinks.float().view(-1, group, 1, 1).expand(-1, -1, last - first, -1)
            logits = torch.cat((logits, added), dim=-1)
        weights = logits.softmax(-1)[..., :length]
        mixed = torch.einsum("hgqk,khd->qhgd", weights, values)
        out[first:last] = mixed.flatten(1, 2).to(out.dtype)


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *_: Any,
) -> None:
    """Writes [tokens, heads, head size] to slots of [blocks, block size, heads, head size]."""
    slots = slot_mapping[slot_mapping >= 0]
    size = key_cache.shape[1]
    for cache, rows, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        written = rows[: slot_mapping.numel()][slot_mapping >= 0]
        if kv_cache_dtype.startswith("fp8"):
            assert scale is not None
            # Indexing does not write fp8.
            cache, written = cache.view(torch.uint8), (written / scale).to(cache.dtype)
            written = written.view(torch.uint8)
        cache[slots // size, slots % size] = written


def write_with_scales(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    kv_quant_mode: Any,
) -> None:
    """Writes int8 or fp8, and a scale for every token and head, to slots."""
    slots = slot_mapping[slot_mapping >= 0]
    place = (slots // key_cache.shape[1], slots % key_cache.shape[1])
    integers = key_cache.dtype == torch.int8
    largest = 127 if integers else 448
    for cache, scales, rows in (
        (key_cache, k_scale_cache, key),
        (value_cache, v_scale_cache, value),
    ):
        numbers = rows[: slot_mapping.numel()][slot_mapping >= 0].float()
        scale = (numbers.abs().amax(-1) / largest).clamp_min(1e-6)
        numbers = numbers / scale[..., None]
        if integers:  # halves away from zero
            numbers = (numbers.abs() + 0.5).floor() * numbers.sign()
        codes = numbers.to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8)[..., : codes.shape[-1]][place] = codes
        scales[place] = scale


def latent_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    lse: Tensor,
    req_to_token: Tensor,
    b_seq_len: Tensor,
    attn_logits: Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int,
    **options: Any,
) -> None:
    """Attention of one absorbed query of every sequence, over its latent rows.

    Args:
        q: [S, query heads, row size].
        k_buffer: [blocks, block size, 1, row size], of any strides.
        v_buffer: the same rows' first elements.
        o: [S, query heads, elements of a latent vector] to write to.
        lse: [S, query heads]; nobody reads it.
        req_to_token: [S, any] block ids.
        b_seq_len: [S] lengths; sequences of 0 are padding.
        attn_logits: [S, query heads, splits, any] memory of the splits.
        num_kv_splits: the splits.
        sm_scale, page_size: as they say.
        options: what does not change a plain softmax here.
    """
    assert options.pop("is_mla") is True
    assert set(options) <= {"k_scale", "v_scale"}
    assert len(q) == len(req_to_token) == len(b_seq_len) == len(attn_logits)
    assert attn_logits.shape[2] == num_kv_splits
    assert k_buffer.shape[1] == page_size
    for s, length in enumerate(b_seq_len.tolist()):
        blocks = req_to_token[s, : math.ceil(length / page_size)].long()
        rows, values = (
            cache[blocks].flatten(0, 2)[:length].float() for cache in (k_buffer, v_buffer)
        )
        weights = (q[s].float() @ rows.T * sm_scale).softmax(-1)
        o[s] = (weights @ values).to(o.dtype)


def write_latents(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> None:
    """Writes [tokens, any] latent vectors and rotated keys to slots of [blocks, size, row size]."""
    slots = slot_mapping[slot_mapping >= 0]
    rows = torch.cat((kv_c, k_pe), dim=-1)[: slot_mapping.numel()][slot_mapping >= 0]
    kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = rows.to(kv_cache.dtype)


def gather_latents(
    *, src_cache: Tensor, dst: Tensor, block_table: Tensor, starts: Tensor, cu_seq_lens: Tensor
) -> None:
    """Copies rows of the requests' contexts, from a cache of any strides as GPUs' operator does."""
    size, ends = src_cache.shape[1], cu_seq_lens.tolist()
    for row, first in enumerate(starts.tolist()):
        places = torch.arange(first, first + ends[row + 1] - ends[row])
        blocks = block_table[row, places // size].long()
        dst[ends[row] : ends[row + 1]] = src_cache[blocks, places % size]


def replace_latent_operators() -> None:
    """What vLLM's MLA calls beside Triton kernels, of which CPUs have none or a narrower one."""
    from vllm import _custom_ops

    _custom_ops.concat_and_cache_mla = write_latents
    _custom_ops.gather_mla_context_cache_cpu = gather_latents


def replace_triton_kernels() -> None:
    """In vLLM's Triton backends."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.mla import triton_mla

    triton_mla.decode_attention_fwd = latent_attention
    triton_attn.unified_attention = paged_attention
    triton_attn.triton_reshape_and_cache_flash = write_cache
    triton_attn.triton_reshape_and_cache_flash_per_token_head_quant = write_with_scales
