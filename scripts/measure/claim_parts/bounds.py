"""How wrong attention may be after tokens were evicted, from what each method leaves out.

H = KV heads, G = query heads of each, m = queries, n = tokens, D = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_parts import AttentionParts


def eviction_bound(norms: AttentionParts) -> Tensor:
    """[..., any] CriticalKV's theta (Theorem 3.3): at least the L1 norm of what a head loses.

    With A_j the weights of all tokens, V_j = v_j W_O, and s the sum of A over kept ones, what is
    left is sum over kept of (A_j / s) V_j, so that

        lost = sum over evicted of A_j V_j  +  (1 - 1/s) sum over kept of A_j V_j
        |lost| <= sum over evicted of A_j |V_j|  +  (1/s - 1) sum over kept of A_j |V_j|
                = C - (2 - 1/s) sum over kept of A_j |V_j|,    C = sum over all of A_j |V_j|

    C does not depend on what is kept. Kept tokens lower the bound only where s > 1/2.

    Args:
        norms: attention over |V_j| in the place of values: for any number of W_O.
    """
    return norms.full - (2 * norms.mass[..., None] - 1) * norms.kept


@dataclass(frozen=True)
class Remainders:
    """What a first-order expansion leaves out, and bounds of it; [H, G, m] fp64 each.

    Attributes:
        numerator, numerator_bound: of the sum of weighted values, in units of exp(mean logit).
        normaliser, normaliser_bound: of the sum of weights, in the same units.
        output, output_bound: of attention outputs.
    """

    numerator: Tensor
    numerator_bound: Tensor
    normaliser: Tensor
    normaliser_bound: Tensor
    output: Tensor
    output_bound: Tensor


def expansion_remainders(
    queries: Tensor, keys: Tensor, values: Tensor, evicted: Tensor, parts: AttentionParts
) -> Remainders:
    """Bounds of what MomentKV's estimate lacks: derived here, not the paper's equations.

    With k and v the means of the E evicted keys and values, d_j = q (k_j - k), which add up to 0,
    and M = exp(q k), the evicted tokens' part of the softmax and its first-order estimate are

        N = M sum of exp(d_j) v_j    N^ = M sum of (1 + d_j) v_j = M (E v + sum of d_j (v_j - v))
        Z = M sum of exp(d_j)        Z^ = M sum of (1 + d_j)     = M E

    By Lagrange 0 <= r_j = exp(d_j) - 1 - d_j <= p_j = d_j^2 / 2 exp(max(d_j, 0)), so

        |N - N^| = M |sum of r_j v_j| <= M sum of p_j |v_j|
        Z - Z^   = M sum of r_j       <= M sum of p_j

    and with K, L the kept tokens' sums, o = (K + N) / (L + Z), o^ = (K + N^) / (L + Z^):

        o - o^ = (N - N^ - o^ (Z - Z^)) / (L + Z) = M sum of r_j (v_j - o^) / (L + Z)
        |o - o^| <= M sum of p_j |v_j - o^| / (L + Z^),    since Z >= Z^

    Args:
        queries: [m, H * G, D] fp32, times the softmax scale.
        keys, values: [H, n, D] fp32.
        evicted: [H, n] bool, at least one in every head.
        parts: attention of the same queries; kept are all that are not evicted.
    """
    # In fp64, since squares of exp(d_j) are beyond fp32 for the farthest.
    queries, keys, values = queries.double(), keys.double(), values.double()
    num_heads, hidden = len(keys), ~evicted[..., None]
    count = evicted.sum(dim=1)[:, None, None, None]
    mean_key = keys.masked_fill(hidden, 0).sum(dim=1, keepdim=True) / count[:, 0]
    mean_value = values.masked_fill(hidden, 0).sum(dim=1, keepdim=True) / count[:, 0]
    grouped = queries.unflatten(1, (num_heads, -1)).permute(1, 2, 0, 3)
    away = (grouped @ (keys - mean_key).mT[:, None]).masked_fill(~evicted[:, None, None], 0)
    left = away.expm1() - away
    most = away.square() / 2 * away.clamp_min(0).exp()
    all_values, from_kept, lse = (
        rows.double().unflatten(1, (num_heads, -1)).movedim(0, 2)
        for rows in (parts.full, parts.kept, parts.lse)
    )
    estimate = mean_value[:, None] + away @ (values - mean_value)[:, None] / count
    mean_logit = (grouped @ mean_key.mT[:, None])[..., 0]
    share = torch.sigmoid(count[..., 0].log() + mean_logit - lse)[..., None]
    output = (1 - share) * from_kept + share * estimate
    far = torch.cdist(output.flatten(1, 2), values).unflatten(1, output.shape[1:3])
    return Remainders(
        numerator=(left @ values[:, None]).norm(dim=3),
        numerator_bound=(most @ values.norm(dim=2)[:, None, :, None])[..., 0],
        normaliser=left.sum(dim=3),
        normaliser_bound=most.sum(dim=3),
        output=(all_values - output).norm(dim=3),
        output_bound=((share / count) * most * far).sum(dim=3),
    )
