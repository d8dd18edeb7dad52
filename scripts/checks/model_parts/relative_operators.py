"""Plain operators of Inkling: attention with biases by distance, and short convolutions.

vLLM's are kernels for NVIDIA's GPUs alone. Sums are in double precision, so that what is stored in
bfloat16 does not depend on their order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def inkling() -> None:
    """Gives Inkling plain operators."""
    from vllm.models.inkling.nvidia import (
        attention,
        layernorm,
        model,
        ops,
        sconv_swa_attn,
        short_conv,
    )
    from vllm.models.inkling.nvidia.ops import silu_and_mul

    attention.fused_qkvr_prep = prepare
    attention._INKLING_FA4_REL_ATTENTION_KERNEL = AttendByDistance()
    layernorm.rmsnorm = rms_norm
    model.add_rmsnorm = lambda rows, delta, weight, eps: (
        rms_norm(rows + delta, weight, eps),
        rows + delta,
    )
    model.embed_rmsnorm = embed
    model.initialize_lamport_rs_conv = lambda *_: None
    sconv_swa_attn.sconv_seq_metadata = find_requests
    short_conv.fused_sconv = convolve
    silu_and_mul.silu_and_mul_triton = gate
    ops.silu_and_mul_triton = gate


class AttendByDistance:
    """Attention of each request's last tokens, with a bias for each distance below `rel_extent`."""

    def register_warmup(self) -> None:
        """Has nothing to compile."""

    def __call__(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_table: Tensor,
        cache_seqlens: Tensor,
        cu_seqlens_q: Tensor,
        softmax_scale: float,
        window_size: tuple[int, int],
        rel_extent: int,
        rel_logits: Tensor,
        out: Tensor,
        **_: Any,
    ) -> None:
        """Writes [tokens, heads, size] outputs, as FlashAttention 4 with Inkling's biases does."""
        group = q.shape[1] // key_cache.shape[2]
        requests = zip(cache_seqlens.tolist(), block_table.long(), strict=True)
        for (length, blocks), (first, last) in zip(
            requests, pairwise(cu_seqlens_q.tolist()), strict=False
        ):
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
                for cache in (key_cache, value_cache)
            )
            places = torch.arange(length - last + first, length)
            distances = places[:, None] - torch.arange(length)
            bias = rel_logits[first:last].double().transpose(0, 1)
            near = distances.clamp(0, rel_extent - 1).expand(len(bias), -1, -1)
            logits = softmax_scale * torch.einsum("thd,khd->htk", q[first:last].double(), keys)
            logits += bias.gather(2, near) * (distances < rel_extent)
            hidden = distances < 0
            if window_size[0] >= 0:
                hidden |= distances > window_size[0]
            hidden = self.hidden(hidden, places, group)
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("htk,khd->thd", weights, values).to(out.dtype)

    def hidden(self, hidden: Tensor, places: Tensor, group: int) -> Tensor:
        """Returns which of [tokens, entries] are not seen, perhaps with an axis of heads before."""
        return hidden


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns rows by their root mean square, times weights."""
    wide = rows.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return normed.to(rows.dtype)


def embed(
    ids: Tensor, table: Tensor, weight: Tensor | None, eps: float, chain_weight: Any = None
) -> Any:
    """Returns the rows of tokens, normed, and perhaps those normed once more."""
    rows = table[ids] if weight is None else rms_norm(table[ids], weight, eps)
    return rows if chain_weight is None else (rows, rms_norm(rows, chain_weight, eps))


def gate(both: Tensor) -> Tensor:
    """Returns SiLU of every other element, times its neighbour."""
    wide = both.double()
    return (silu(wide[:, ::2]) * wide[:, 1::2]).to(both.dtype)


def find_requests(
    starts: Tensor,
    num_reqs: int,
    num_tokens: int,
    seq_idx_out: Tensor,
    query_start_out: Tensor,
    num_padded_tokens: int,
) -> None:
    """Writes the request of each token, and the first token of that."""
    seq_idx_out[:num_padded_tokens] = query_start_out[:num_padded_tokens] = 0
    for request, (first, last) in enumerate(pairwise(starts[: num_reqs + 1].tolist())):
        seq_idx_out[first:last], query_start_out[first:last] = request, first


def convolve(
    rows: Tensor,
    weight: Tensor,
    cache: Tensor,
    positions: Tensor,
    block_table: Tensor,
    seq_idx: Tensor,
    slots: Tensor,
    query_start: Tensor,
    offset: int,
    width: int,
    block_size: int,
    **_: Any,
) -> Tensor:
    """Returns rows plus their causal convolution, by channel, and stores them in the cache."""
    part, tokens = slice(offset, offset + width), torch.arange(len(rows))
    slots, is_real = slots[: len(rows)], slots[: len(rows)] >= 0
    at = slots[is_real]
    by_head = rows.view(len(rows), cache.shape[1], width)
    cache[at // block_size, :, at % block_size, part] = by_head[is_real]
    taps, out = weight.double(), rows.double()
    for back in range(weight.shape[1]):
        places = (positions - back).clamp_min(0)
        blocks = block_table[seq_idx.long(), places // block_size].long()
        before = cache[blocks, :, places % block_size, part].flatten(1)
        is_here = tokens - back >= query_start
        seen = torch.where(is_here[:, None], rows[(tokens - back).clamp_min(0)], before)
        is_seen = is_real & (positions >= back)
        out += seen.double() * taps[:, -1 - back] * is_seen[:, None]
    return out.to(rows.dtype)


def prepare(
    qkvr: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    rel_proj: Tensor,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    d_rel: int,
    conv_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    conv_block_table: Tensor,
    seq_idx: Tensor,
    conv_slots: Tensor,
    query_start: Tensor,
    slots: Tensor,
    off_k: int,
    off_v: int,
    conv_block_size: int,
    log_scaling: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Writes keys and values to the cache; returns queries and the bias of each distance."""
    sizes = [num_q_heads * head_dim, *[num_kv_heads * head_dim] * 2, num_q_heads * d_rel]
    q, k, v, r = (part.contiguous() for part in qkvr.split(sizes, dim=1))
    where = positions, conv_block_table, seq_idx, conv_slots, query_start
    keys, values = (
        convolve(rows, taps, conv_cache, *where, offset, head_dim, conv_block_size)
        for rows, taps, offset in ((k, k_weight, off_k), (v, v_weight, off_v))
    )
    keys = rms_norm(keys.view(-1, num_kv_heads, head_dim), k_norm_weight, eps)
    kept = slots[: len(keys)] >= 0
    at, size = slots[: len(keys)][kept], key_cache.shape[1]
    key_cache[at // size, at % size] = keys[kept]
    value_cache[at // size, at % size] = values.view_as(keys)[kept]
    queries = rms_norm(q.view(-1, num_q_heads, head_dim), q_norm_weight, eps)
    biases = torch.einsum("thd,de->the", r.view(-1, num_q_heads, d_rel).double(), rel_proj.double())
    biases = biases.to(qkvr.dtype)
    if log_scaling is not None:
        scale = log_scaling.view(-1, 1, 1)
        queries, biases = ((rows * scale).to(qkvr.dtype) for rows in (queries, biases))
    return queries.flatten(1), biases
