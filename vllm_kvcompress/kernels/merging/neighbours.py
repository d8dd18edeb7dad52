"""How alike keys of a head are, in plain torch."""

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
