"""Divides attention between kept and evicted tokens.

H = KV heads, G = query heads per KV head, m = queries, n = tokens, D = head size, M = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.moments import split_moments


@dataclass(frozen=True)
class AttentionParts:
    """Attention of some queries: full = mass * kept + (1 - mass) * evicted.

    Attributes:
        full, kept, evicted: [m, H * G, D] fp32 attention over all tokens that a query sees, over
            the kept ones and over the evicted ones (0 where there are none).
        mass: [m, H * G] share of the full attention weights that lies on kept tokens.
        lse: [m, H * G] natural log-sum-exp of the kept tokens' logits.
    """

    full: Tensor
    kept: Tensor
    evicted: Tensor
    mass: Tensor
    lse: Tensor


def attend_in_parts(
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    softcap: float = 0.0,
    bias: Tensor | None = None,
) -> AttentionParts:
    """Causal attention in fp32.

    Args:
        queries: [m, H * G, D] fp32, times the softmax scale.
        positions: [m] of the queries; later tokens are not seen.
        keys, values: [H, n, D] fp32, in order of position.
        kept: [H, n] bool.
        softcap: cap of the logits; 0: none.
        bias: [H, n] added to the logits.
    """
    grouped = queries.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    logits = grouped @ keys[:, None].transpose(2, 3)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits += bias[:, None, None]
    hidden = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(dim=-1)
    weights = (logits - lse[..., None]).exp()
    on_kept = weights * kept[:, None, None]
    mass = on_kept.sum(dim=-1)
    full, from_kept = weights @ values[:, None], on_kept @ values[:, None]
    tiny = torch.finfo(torch.float32).tiny
    parts = (
        full,
        from_kept / mass.clamp_min(tiny)[..., None],
        (full - from_kept) / (1 - mass).clamp_min(tiny)[..., None],
        mass,
        lse + mass.clamp_min(tiny).log(),
    )
    # [H, G, m, ...] -> [m, H * G, ...]
    return AttentionParts(*(part.flatten(0, 1).transpose(0, 1) for part in parts))


def relative_error(outputs: Tensor, parts: AttentionParts) -> Tensor:
    """|o - o_full| / |o_full| [m, H * G] of outputs [m, H * G, D]."""
    return (outputs - parts.full).norm(dim=-1) / parts.full.norm(dim=-1)


def projected_error(outputs: Tensor, parts: AttentionParts, output_weight: Tensor) -> Tensor:
    """Sum of absolutes of (o - o_full) W_O by head [m, H * G]: CriticalKV's L1 (Eq. 4).

    `outputs` is [m, H * G, D], `output_weight` [H * G, D, M]: o_proj by query head.
    """
    errors = (outputs - parts.full).transpose(0, 1)
    return (errors @ output_weight.float()).abs().sum(dim=-1).transpose(0, 1)


def gap_cosine(parts: AttentionParts) -> Tensor:
    """Cosine [m, H * G] between attention over kept and evicted tokens; 1 where none is evicted."""
    return _cosine(parts.kept, parts)


def estimate_cosine(parts: AttentionParts, queries: Tensor, moments: Tensor) -> Tensor:
    """Cosine [m, H * G] between MomentKV's estimate and attention over evicted tokens.

    `queries` is [m, H * G, D] fp32, scaled; `moments` [H, moment_size] fp32.
    """
    count, _, mean_value, cross = split_moments(moments, queries.shape[2])
    grouped = queries.unflatten(1, (len(moments), -1))
    step = torch.einsum("mhgd,hed->mhge", grouped, cross) / count.clamp_min(1)[:, None, None]
    return _cosine((step + mean_value[:, None]).flatten(1, 2), parts)


def _cosine(estimates: Tensor, parts: AttentionParts) -> Tensor:
    cosine = torch.nn.functional.cosine_similarity(estimates, parts.evicted, dim=-1)
    return torch.where(1 - parts.mass > 1e-6, cosine, 1.0)
