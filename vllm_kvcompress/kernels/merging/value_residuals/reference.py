"""How far values are from their weighted mean, and neighbours together, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def value_residuals(values: Tensor, weights: Tensor, order: int, num_pairs: int) -> Tensor:
    """Norms of r = v - o, where o is the weighted sum of the values, and of sums of two r.

    Args:
        values: [H, n, D]; padding finite.
        weights: [H, n] fp32, 0 for padding.
        order: 1 or 2, of the norms of single residuals.
        num_pairs: how many of the entries behind each one make a pair with it.

    Returns:
        [1 + num_pairs, H, n] fp32: |r_i|, then for each distance p |r_i + r_{i+p}| in L2, 0 where
        there is no entry i + p.
    """
    wide = values.float()
    rest = wide - weights[:, None] @ wide
    norms = wide.new_zeros((1 + num_pairs, *weights.shape))
    norms[0] = torch.linalg.vector_norm(rest, ord=order, dim=2)
    for apart in range(1, min(num_pairs + 1, rest.shape[1])):
        pairs = rest[:, apart:] + rest[:, :-apart]
        norms[apart, :, :-apart] = torch.linalg.vector_norm(pairs, dim=2)
    return norms
