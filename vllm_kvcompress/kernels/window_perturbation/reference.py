"""How much attention outputs change when an entry is pruned (OBCache), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import finite, head_slices, tile_bytes
from vllm_kvcompress.kernels.common.window_columns import HIDDEN, WindowColumns, by_head


def window_perturbation(view: KVView, queries: Tensor, scale: float, variant: str) -> Tensor:
    """Squared change of the outputs of the last queries, to second order, per entry.

    With the logit e, the weight A and the output o of a query: `value` A^2 |v|^2, `key`
    (A e)^2 |v - o|^2, `joint` A^2 |v + e (v - o)|^2; summed over the window and the group, whose
    outputs add up. What a query sees, and the tiles, are those of `window_mass`.

    Args:
        view: of a layer.
        queries: [w, H * G, D] last queries, oldest first, in the cache's type.
        scale: softmax scale.
        variant: value, key or joint.

    Returns:
        [H, n] fp32, not negative; 0 behind the lengths. Zeros if w is 0.
    """
    num_heads, num_entries = view.num_heads, view.capacity
    num_queries = queries.shape[0]
    result = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=view.device)
    if num_queries == 0 or num_entries == 0:
        return result
    group = queries.shape[1] // num_heads
    grouped = by_head(queries, num_heads)
    columns = WindowColumns.of(view, range(num_queries - 1, -1, -1))
    row_size = group * columns.num_columns
    slices = head_slices(num_heads, 4 * 4 * num_queries * row_size, view.device)
    tile = max(1, tile_bytes(view.device) // (4 * 4 * row_size * slices[0].stop))
    keys, values = view.keys(), view.values()
    tail_keys, tail_values = view.tail_keys(), view.tail_values()
    for heads in slices:
        valid = view.valid[heads]
        seen_keys = columns.seen(heads, finite(keys[heads], valid), tail_keys[heads])
        seen_values = columns.seen(heads, finite(values[heads], valid), tail_values[heads])
        squares = seen_values.square().sum(dim=2)
        sums = result.new_zeros(len(squares), 1, columns.num_columns)
        for start in range(0, num_queries, tile):
            rows = slice(start, min(start + tile, num_queries))
            out = result.new_empty(len(seen_keys) * (rows.stop - start) * row_size)
            logits = columns.logits(heads, rows, grouped[heads], seen_keys, scale, out)
            num_seen = logits.shape[2]
            seeing = columns.seeing[heads, rows].repeat_interleave(group, dim=1)
            weights = torch.softmax(logits, dim=2) * seeing[:, :, None]
            logits.masked_fill_(logits <= HIDDEN / 2, 0)
            some, lengths = seen_values[:, :num_seen], squares[:, :num_seen]
            change = _change(logits, weights @ some, some, lengths, variant)
            sums[:, 0, :num_seen] += (weights.square_() * change).sum(dim=1)
        result[heads] = columns.fold(heads, sums)[:, 0]
    return result


def _change(
    logits: Tensor, outputs: Tensor, values: Tensor, squares: Tensor, variant: str
) -> Tensor:
    """[heads, rows, n] squared change for a weight of 1: |a v + b o|^2, b = -e or 0."""
    squares = squares[:, None]
    if variant == "value":
        return squares.expand_as(logits)
    of_value = logits if variant == "key" else 1 + logits
    along = outputs @ values.mT
    lengths = outputs.square().sum(dim=2, keepdim=True)
    change = of_value.square() * squares - 2 * of_value * logits * along
    return (change + logits.square() * lengths).clamp_min_(0)
