"""Similarity of neighbouring keys and of values to their mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView


def neighbour_cosines(view: KVView) -> Tensor:
    """[H, n] fp32 cosine of each key and the one before it.

    0 for the first key, for zero keys, and behind the lengths.
    """
    parts = []
    for heads in view.head_slices():
        keys = view.clean(0, heads).float()
        norms = torch.linalg.vector_norm(keys, dim=2)
        dots = (keys[:, 1:] * keys[:, :-1]).sum(dim=2)
        parts.append(dots / (norms[:, 1:] * norms[:, :-1]).clamp_min(1e-12))
    return functional.pad(torch.cat(parts).clamp_(-1, 1), (1, 0))


def key_distances(view: KVView, others: Tensor) -> Tensor:
    """[H, n] fp32 distance of each key from another one of its head; 0 behind the lengths.

    Args:
        others: [H, n] int64 place of the other key.
    """
    distances = []
    for heads in view.head_slices():
        keys = view.clean(0, heads).float()
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        distances.append(torch.linalg.vector_norm(keys - keys[rows, others[heads]], dim=2))
    return torch.cat(distances).masked_fill_(~view.valid, 0)


def value_residuals(view: KVView, weights: Tensor, order: int, num_pairs: int = 0) -> Tensor:
    """Norms of r = v - o, where o is the weighted sum of the values, and of sums of two r.

    Args:
        weights: [H, n] fp32; entries behind the lengths do not count.
        order: 1 or 2, of the norms of single residuals.
        num_pairs: number of entries behind each one that make a pair with it.

    Returns:
        [1 + num_pairs, H, n] fp32: |r_i|, then for each distance p |r_i + r_{i+p}| in L2; 0 where
        one of the entries is behind the length.
    """
    clean, valid = weights.masked_fill(~view.valid, 0), view.valid
    norms = clean.new_zeros((1 + num_pairs, *weights.shape))
    for heads in view.head_slices():
        values = view.clean(1, heads).float()
        rest = values - clean[heads, None] @ values
        norms[0, heads] = torch.linalg.vector_norm(rest, ord=order, dim=2)
        for apart in range(1, min(num_pairs + 1, view.capacity)):
            pairs = rest[:, apart:] + rest[:, :-apart]
            norms[apart, heads, :-apart] = torch.linalg.vector_norm(pairs, dim=2)
    for apart in range(1 + num_pairs):
        norms[apart] *= functional.pad(valid, (0, apart))[:, apart:]
    return norms
