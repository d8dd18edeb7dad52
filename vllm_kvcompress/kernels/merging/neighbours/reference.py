"""How alike keys of the same head are, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def neighbour_cosines(keys: Tensor) -> Tensor:
    """[H, n] cosine of each key with the one before it; 0 for the first, and for zero keys.

    Args:
        keys: [H, n, D]; padding finite.
    """
    wide = keys.float()
    norms = torch.linalg.vector_norm(wide, dim=2)
    dots = (wide[:, 1:] * wide[:, :-1]).sum(dim=2)
    cosines = dots / (norms[:, 1:] * norms[:, :-1]).clamp_min(1e-12)
    return functional.pad(cosines.clamp(-1, 1), (1, 0))


def key_distances(keys: Tensor, others: Tensor) -> Tensor:
    """[H, n] fp32 distance of each key from another one of its head.

    Args:
        keys: [H, n, D]; padding finite.
        others: [H, n] int64 the other one's place.
    """
    wide = keys.float()
    heads = torch.arange(keys.shape[0], device=keys.device)[:, None]
    return torch.linalg.vector_norm(wide - wide[heads, others], dim=2)
