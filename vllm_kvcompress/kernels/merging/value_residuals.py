"""How far values are from their weighted mean, and neighbours together, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView


def value_residuals(view: KVView, weights: Tensor, order: int, num_pairs: int = 0) -> Tensor:
    """Norms of r = v - o, where o is the weighted sum of the values, and of sums of two r.

    Args:
        view: of a layer.
        weights: [H, n] fp32; entries behind the lengths do not count.
        order: 1 or 2, of the norms of single residuals.
        num_pairs: how many of the entries behind each one make a pair with it.

    Returns:
        [1 + num_pairs, H, n] fp32: |r_i|, then for each distance p |r_i + r_{i+p}| in L2; 0 where
        one of the entries is behind the length.
    """
    clean, valid = weights.masked_fill(~view.valid, 0), view.valid
    norms = clean.new_zeros((1 + num_pairs, *weights.shape))
    for heads in view.head_slices():
        wide = view.clean(1, heads).float()
        rest = wide - clean[heads, None] @ wide
        norms[0, heads] = torch.linalg.vector_norm(rest, ord=order, dim=2)
        for apart in range(1, min(num_pairs + 1, view.capacity)):
            pairs = rest[:, apart:] + rest[:, :-apart]
            norms[apart, heads, :-apart] = torch.linalg.vector_norm(pairs, dim=2)
    for apart in range(1 + num_pairs):
        norms[apart] *= functional.pad(valid, (0, apart))[:, apart:]
    return norms
