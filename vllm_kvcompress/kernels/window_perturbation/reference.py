"""How much attention outputs change when an entry is pruned (OBCache), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import finite, tile_bytes
from vllm_kvcompress.kernels.common.window_columns import HIDDEN, WindowColumns


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
    grouped = queries.reshape(num_queries, num_heads, group, view.head_size).transpose(0, 1)
    columns = WindowColumns.of(view.lengths, num_entries, view.num_tail, num_queries)
    num_seen = num_entries + view.num_tail
    tile = max(1, tile_bytes(view.device) // (4 * 4 * group * columns.bias.shape[1]))

    def with_window(entries: Tensor, tail: Tensor, head: int) -> Tensor:
        seen = torch.cat([finite(entries[head], view.valid[head]), tail[head]])
        return torch.cat([seen, seen[columns.places[head]]]).float()

    for head in range(num_heads):
        head_keys = with_window(view.keys(), view.tail_keys(), head)
        head_values = with_window(view.values(), view.tail_values(), head)
        squares = head_values.square().sum(dim=1)
        for start in range(0, num_queries, tile):
            rows = slice(start, start + tile)
            mine = grouped[head, rows].float().flatten(0, 1)
            logits = torch.addmm(columns.bias[head], mine, head_keys.t(), alpha=scale)
            window = logits.unflatten(0, (-1, group))[..., num_seen:]
            window.masked_fill_(columns.hidden[head, rows, None], HIDDEN)
            seeing = columns.seeing[head, rows].repeat_interleave(group)
            weights = torch.softmax(logits, dim=1) * seeing[:, None]
            logits.masked_fill_(logits <= HIDDEN / 2, 0)
            outputs = weights @ head_values
            change = _change(logits, outputs, head_values, squares, variant)
            result[head] += columns.fold(head, (weights.square_() * change).sum(dim=0))
    return result


def _change(
    logits: Tensor, outputs: Tensor, values: Tensor, squares: Tensor, variant: str
) -> Tensor:
    """[rows, n] squared change for a weight of 1: |a v + b o|^2, b = -e or 0."""
    if variant == "value":
        return squares.expand_as(logits)
    of_value = logits if variant == "key" else 1 + logits
    along = outputs @ values.t()
    lengths = outputs.square().sum(dim=1, keepdim=True)
    change = of_value.square() * squares - 2 * of_value * logits * along
    return (change + logits.square() * lengths).clamp_min_(0)
