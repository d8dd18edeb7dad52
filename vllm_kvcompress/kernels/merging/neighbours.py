"""How alike keys of the same head are, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView


def neighbour_cosines(view: KVView) -> Tensor:
    """[H, n] fp32 cosine of each key with the one before it; 0 for the first, and for zero keys.

    0 also behind the lengths.
    """
    return torch.cat([_cosines(view.clean(0, heads)) for heads in view.head_slices()])


def _cosines(keys: Tensor) -> Tensor:
    wide = keys.float()
    norms = torch.linalg.vector_norm(wide, dim=2)
    dots = (wide[:, 1:] * wide[:, :-1]).sum(dim=2)
    cosines = dots / (norms[:, 1:] * norms[:, :-1]).clamp_min(1e-12)
    return functional.pad(cosines.clamp(-1, 1), (1, 0))


def key_distances(view: KVView, others: Tensor) -> Tensor:
    """[H, n] fp32 distance of each key from another one of its head; 0 behind the lengths.

    Args:
        view: of a layer.
        others: [H, n] int64 the other one's place.
    """
    distances = [_distances(view.clean(0, heads), others[heads]) for heads in view.head_slices()]
    return torch.cat(distances).masked_fill(~view.valid, 0)


def _distances(keys: Tensor, others: Tensor) -> Tensor:
    wide = keys.float()
    heads = torch.arange(keys.shape[0], device=keys.device)[:, None]
    return torch.linalg.vector_norm(wide - wide[heads, others], dim=2)
