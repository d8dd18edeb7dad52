"""The kept key that is most similar to each evicted one (D2O), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import exact_bf16_products, tile_bytes
from vllm_kvcompress.kernels.dispatch import by_device


@by_device("merging.nearest_keys_triton")
def nearest_keys(view: KVView, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The highest cosine of each evicted key to a kept one of its head, and the earliest such key.

    Args:
        kept: [H, n] bool; entries below the lengths that are not kept are evicted.

    Returns:
        [H, n] fp32 cosines and [H, n] int64 places; 0 for entries that are not evicted, and where
        a head keeps nothing. Never a tensor [n, n].
    """
    keys, evicted, kept = view.keys(), view.valid & ~kept, view.valid & kept
    cosines = torch.zeros(keys.shape[:2], device=keys.device)
    places = torch.zeros(keys.shape[:2], dtype=torch.int64, device=keys.device)
    for h in range(keys.shape[0]):
        here, gone = kept[h].nonzero()[:, 0], evicted[h].nonzero()[:, 0]
        if not len(here) or not len(gone):
            continue
        others, scales = _with_inverse_norms(keys[h, here])
        rows = max(1, tile_bytes(keys.device) // (4 * len(here)))
        for part in gone.split(rows):
            own, scale = _with_inverse_norms(keys[h, part])
            with exact_bf16_products(keys.dtype):
                products = own @ others.T
            best, index = (products * scales).max(dim=1)
            cosines[h, part] = best * scale
            places[h, part] = here[index]
    return cosines, places


def _with_inverse_norms(keys: Tensor) -> tuple[Tensor, Tensor]:
    """[m, D] fp32 keys, and [m] inverses of their norms."""
    keys = keys.float()
    return keys, 1 / torch.linalg.vector_norm(keys, dim=1).clamp_min(1e-8)
