"""Scores in plain torch, tiled so that no [heads, window, tokens] tensor exists for long prompts.

H = KV heads, G = query heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TILE_ELEMENTS = 1 << 23  # largest temporary, in elements (32 MiB of fp32)


def valid_entries(lengths: Tensor, num_entries: int) -> Tensor:
    """[H, n] bool: entries below each head's length."""
    return torch.arange(num_entries, device=lengths.device) < lengths[:, None]


def window_mass(
    keys: Tensor, lengths: Tensor, tail_keys: Tensor, queries: Tensor, scale: float
) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees: the valid entries, the tail, and among the last
    w of these (the window itself) only those not after the query. One head at a time, in tiles
    of at most `TILE_ELEMENTS` logits.

    Args:
        keys: [H, n, D] keys, padded on the right.
        lengths: [H] int64 valid entries.
        tail_keys: [H, t, D] keys behind the valid entries.
        queries: [w, H * G, D] last queries, oldest first.
        scale: softmax scale.

    Returns:
        [H, n] fp32, mean over the window and the group; at most 1 in sum. Zeros if w is 0.
    """
    num_heads, num_entries, head_size = keys.shape
    num_queries, num_tail = queries.shape[0], tail_keys.shape[1]
    mass = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=keys.device)
    if num_queries == 0:
        return mass
    group = queries.shape[1] // num_heads
    grouped = queries.view(num_queries, num_heads, group, head_size).transpose(0, 1)
    order = _entry_order(lengths, num_entries, num_tail)
    rows = max(1, TILE_ELEMENTS // (group * (num_entries + num_tail)))
    for head in range(num_heads):
        visible_keys = torch.cat([keys[head], tail_keys[head]]).float().t()
        total = lengths[head] + num_tail
        for start in range(0, num_queries, rows):
            tile = grouped[head, start : start + rows].float()
            logits = (tile.flatten(0, 1) @ visible_keys).mul_(scale).unflatten(0, (-1, group))
            # Query i sees the first total - (w - 1 - i) entries in position order.
            nth = torch.arange(start, start + tile.shape[0], device=keys.device)
            hidden = order[head] >= (total - (num_queries - 1 - nth))[:, None]
            logits.masked_fill_(hidden[:, None], float("-inf"))
            mass[head] += torch.softmax(logits, dim=2)[..., :num_entries].sum(dim=(0, 1))
    return mass / (num_queries * group)


def _entry_order(lengths: Tensor, num_entries: int, num_tail: int) -> Tensor:
    """[H, n + t] each entry's place in its head's sequence; padding is placed beyond any."""
    device = lengths.device
    body = torch.arange(num_entries, device=device).expand(lengths.numel(), -1)
    body = torch.where(valid_entries(lengths, num_entries), body, torch.iinfo(torch.int64).max)
    tail = lengths[:, None] + torch.arange(num_tail, device=device)
    return torch.cat([body, tail], dim=1)


def max_or_mean_pool(scores: Tensor, kernel_size: int, mode: str) -> Tensor:
    """Same-length pooling over entries with stride 1.

    Args:
        scores: [H, n] fp32.
        kernel_size: odd width; 1 changes nothing.
        mode: "max" (beyond the ends counts as minus infinity) or "mean" (as zero).
    """
    if kernel_size <= 1 or scores.shape[1] == 0:
        return scores
    padding = kernel_size // 2
    if mode == "max":
        return functional.max_pool1d(scores[None], kernel_size, 1, padding)[0]
    return functional.avg_pool1d(scores[None], kernel_size, 1, padding)[0]


def value_norms_l1(values: Tensor, output_weight: Tensor) -> Tensor:
    """Mean over the group of ||v W_O||_1 per entry (CriticalKV, arXiv 2502.03805, Alg. 1).

    The projected values are never stored: entries go in tiles.

    Args:
        values: [H, n, D].
        output_weight: [H * G, D, M] o_proj by query head.

    Returns:
        [H, n] fp32.
    """
    num_heads, num_entries, head_size = values.shape
    group = output_weight.shape[0] // num_heads
    width = output_weight.shape[2]
    weight = output_weight.view(num_heads, group, head_size, width)
    norms = torch.empty(num_heads, num_entries, dtype=torch.float32, device=values.device)
    rows = max(1, min(num_entries, TILE_ELEMENTS // 8 // width))
    for head in range(num_heads):
        for start in range(0, num_entries, rows):
            tile = values[head, start : start + rows]
            total = torch.zeros(tile.shape[0], dtype=torch.float32, device=values.device)
            for member in range(group):
                projected = tile @ weight[head, member]
                total += torch.linalg.vector_norm(projected, ord=1, dim=1, dtype=torch.float32)
            norms[head, start : start + rows] = total / group
    return norms


def value_norms_l2(values: Tensor, output_gram: Tensor) -> Tensor:
    """Mean over the group of ||v W_O||_2 = sqrt(v Q v^T) per entry, with Q = W W^T.

    Args:
        values: [H, n, D].
        output_gram: [H * G, D, D] fp32.

    Returns:
        [H, n] fp32.
    """
    num_heads, num_entries, head_size = values.shape
    group = output_gram.shape[0] // num_heads
    gram = output_gram.view(num_heads, group, head_size, head_size)
    norms = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=values.device)
    rows = max(1, TILE_ELEMENTS // max(1, num_heads * head_size))
    for start in range(0, num_entries, rows):
        tile = values[:, start : start + rows].float()
        for member in range(group):
            squares = ((tile @ gram[:, member]) * tile).sum(dim=2)
            norms[:, start : start + rows] += squares.clamp_min_(0).sqrt_()
    return norms / group


def keydiff_scores(keys: Tensor, lengths: Tensor, anchor: str) -> Tensor:
    """Minus the cosine between each key and an anchor (KeyDiff).

    Args:
        keys: [H, n, D], padded on the right.
        lengths: [H] int64.
        anchor: mean_normalized (mean of the unit keys), mean_raw, median, or pairwise (minus the
            sum of cosines to all keys; same ranking as mean_normalized).

    Returns:
        [H, n] fp32; 0 for a zero key or a zero anchor.
    """
    valid = valid_entries(lengths, keys.shape[1])[..., None]
    wide = keys.float().masked_fill_(~valid, 0.0)
    norms = torch.linalg.vector_norm(wide, dim=2, keepdim=True)
    unit = wide / norms.clamp_min(1e-8)
    count = lengths[:, None].clamp_min(1).float()
    if anchor == "mean_raw":
        centre = wide.sum(dim=1) / count
    elif anchor == "median":
        centre = wide.masked_fill(~valid, float("nan")).nanmedian(dim=1).values
    else:
        centre = unit.sum(dim=1) / count
    dots = (unit @ centre[:, :, None])[..., 0]
    if anchor == "pairwise":
        return -dots * count
    length = torch.linalg.vector_norm(centre, dim=1, keepdim=True)
    return -dots / length.clamp_min(1e-8)
