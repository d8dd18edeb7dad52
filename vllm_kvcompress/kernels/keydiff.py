"""Dissimilarity of keys to an anchor (KeyDiff), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import finite, tile_bytes


def keydiff_scores(view: KVView, anchor: str) -> Tensor:
    """Minus the cosine of each key and an anchor (KeyDiff).

    Args:
        anchor: mean_normalized (mean of the unit keys) or mean_raw (mean of the keys).

    Returns:
        [H, n] fp32; 0 for a zero key or anchor, and behind the lengths.
    """
    keys, lengths, valid = view.keys(), view.lengths, view.valid
    num_heads, num_entries, head_size = keys.shape
    rows = max(1, tile_bytes(keys.device) // (4 * num_heads * head_size))
    norms = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float32)
    inverse = torch.where(valid, norms.clamp_min(1e-8).reciprocal(), 0.0)
    count = lengths[:, None].clamp_min(1).float()
    tiles = [slice(start, start + rows) for start in range(0, num_entries, rows)]
    weight = valid.float() if anchor == "mean_raw" else inverse
    centre = torch.zeros(num_heads, 1, head_size, device=keys.device)
    for tile in tiles:
        centre += weight[:, None, tile] @ finite(keys[:, tile], valid[:, tile]).float()
    centre = centre[:, 0] / count
    length = torch.linalg.vector_norm(centre, dim=1, keepdim=True).clamp_min(1e-8)
    dots = torch.empty(num_heads, num_entries, dtype=torch.float32, device=keys.device)
    for tile in tiles:
        dots[:, tile] = (finite(keys[:, tile], valid[:, tile]).float() @ centre[:, :, None])[..., 0]
    return -(dots * inverse) / length
