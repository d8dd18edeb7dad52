"""Dissimilarity of keys to an anchor (KeyDiff), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import finite, tile_bytes


def keydiff_scores(view: KVView, anchor: str, metric: str = "cosine") -> Tensor:
    """Minus the cosine of each key and an anchor (KeyDiff).

    Args:
        anchor: mean_normalized (mean of the unit keys), mean_raw, median, or pairwise (minus the
            sum of cosines to all keys; same ranking as mean_normalized).
        metric: cosine; dot (minus the product) or euclidean (the distance), not with pairwise.

    Returns:
        [H, n] fp32; a cosine is 0 for a zero key or anchor, and behind the lengths.
    """
    keys, lengths, valid = view.keys(), view.lengths, view.valid
    num_heads, num_entries, head_size = keys.shape
    rows = max(1, tile_bytes(keys.device) // (4 * num_heads * head_size))
    norms = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float32)
    inverse = torch.where(valid, norms.clamp_min(1e-8).reciprocal(), 0.0)
    count = lengths[:, None].clamp_min(1).float()
    tiles = [slice(start, start + rows) for start in range(0, num_entries, rows)]
    if anchor == "median":
        centre = torch.stack([_median(keys[h], valid[h]) for h in range(num_heads)])
    else:
        weight = valid.float() if anchor == "mean_raw" else inverse
        centre = torch.zeros(num_heads, 1, head_size, device=keys.device)
        for tile in tiles:
            centre += weight[:, None, tile] @ finite(keys[:, tile], valid[:, tile]).float()
        centre = centre[:, 0] / count
    length = torch.linalg.vector_norm(centre, dim=1, keepdim=True).clamp_min(1e-8)
    dots = torch.empty(num_heads, num_entries, dtype=torch.float32, device=keys.device)
    for tile in tiles:
        dots[:, tile] = (finite(keys[:, tile], valid[:, tile]).float() @ centre[:, :, None])[..., 0]
    if metric == "dot":
        return -dots
    if metric == "euclidean":
        squares = norms.masked_fill(~valid, 0) ** 2 - 2 * dots + length**2
        return squares.clamp_min(0).sqrt().masked_fill(~valid, 0)
    dots *= inverse
    return -dots * count if anchor == "pairwise" else -dots / length


def _median(keys: Tensor, valid: Tensor) -> Tensor:
    """[D] median of each coordinate over the valid keys (the lower one of two)."""
    return keys.float().masked_fill_(~valid[:, None], float("nan")).nanmedian(dim=0).values
