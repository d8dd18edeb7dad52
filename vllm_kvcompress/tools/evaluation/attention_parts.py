"""What later queries get of a cache: of all tokens, of the kept and of the evicted ones apart.

H = KV heads, G = query heads of each, m = queries, n = tokens, D = head size, M = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.moments import split_moments


@dataclass(frozen=True)
class AttentionParts:
    """Attention of some queries, divided between kept and evicted tokens.

    whole = mass * kept + (1 - mass) * evicted.

    Attributes:
        whole, kept, evicted: [m, H * G, D] fp32 attention over all tokens that a query sees, over
            the kept ones of them, and over the evicted ones (0 where there are none).
        mass: [m, H * G] share of the whole's weights that lies on kept tokens.
        lse: [m, H * G] natural log-sum-exp of the kept tokens' logits.
    """

    whole: Tensor
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
    """Attention in fp32, causal.

    Args:
        queries: [m, H * G, D] fp32, times the softmax scale.
        positions: [m] of the queries: tokens behind it are not seen.
        keys, values: [H, n, D] fp32, in order of position.
        kept: [H, n] bool.
        softcap: of the logits; 0: none.
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
    whole, from_kept = weights @ values[:, None], on_kept @ values[:, None]
    tiny = torch.finfo(torch.float32).tiny
    parts = (
        whole,
        from_kept / mass.clamp_min(tiny)[..., None],
        (whole - from_kept) / (1 - mass).clamp_min(tiny)[..., None],
        mass,
        lse + mass.clamp_min(tiny).log(),
    )
    # [H, G, m, ...] -> [m, H * G, ...]
    return AttentionParts(*(part.flatten(0, 1).transpose(0, 1) for part in parts))


def relative_error(outputs: Tensor, parts: AttentionParts) -> Tensor:
    """[m, H * G] |o - o_full| / |o_full| of outputs [m, H * G, D]."""
    return (outputs - parts.whole).norm(dim=-1) / parts.whole.norm(dim=-1)


def projected_error(outputs: Tensor, parts: AttentionParts, output_weight: Tensor) -> Tensor:
    """[m, H * G] sum of absolutes of (o - o_full) W_O, head by head: CriticalKV's L1 (Eq. 4).

    Args:
        outputs: [m, H * G, D].
        parts: of the same queries.
        output_weight: [H * G, D, M] o_proj by query head.
    """
    wrong = (outputs - parts.whole).transpose(0, 1)
    return (wrong @ output_weight.float()).abs().sum(dim=-1).transpose(0, 1)


def gap_cosine(parts: AttentionParts) -> Tensor:
    """[m, H * G] cosine of what kept and evicted tokens give; 1 where nothing is evicted."""
    return _cosine(parts.kept, parts)


def estimate_cosine(parts: AttentionParts, queries: Tensor, moments: Tensor) -> Tensor:
    """[m, H * G] cosine of MomentKV's estimate and what evicted tokens give; as `gap_cosine`.

    Args:
        parts: of the queries.
        queries: [m, H * G, D] fp32, times the softmax scale.
        moments: [H, moment_size] fp32.
    """
    count, _, mean_value, cross = split_moments(moments, queries.shape[2])
    grouped = queries.unflatten(1, (len(moments), -1))
    step = torch.einsum("mhgd,hed->mhge", grouped, cross) / count.clamp_min(1)[:, None, None]
    return _cosine((step + mean_value[:, None]).flatten(1, 2), parts)


def _cosine(found: Tensor, parts: AttentionParts) -> Tensor:
    cosine = torch.nn.functional.cosine_similarity(found, parts.evicted, dim=-1)
    return torch.where(1 - parts.mass > 1e-6, cosine, 1.0)
