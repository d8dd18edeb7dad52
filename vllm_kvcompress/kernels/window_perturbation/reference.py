"""How much attention outputs change when an entry is pruned (OBCache), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.tiles import finite, tile_bytes, valid_entries
from vllm_kvcompress.kernels.common.window_columns import HIDDEN, WindowColumns


def window_perturbation(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    queries: Tensor,
    scale: float,
    variant: str,
) -> Tensor:
    """Squared change of the outputs of the last queries, to second order, per entry.

    With the logit e, the weight A and the output o of a query: `value` A^2 |v|^2, `key`
    (A e)^2 |v - o|^2, `joint` A^2 |v + e (v - o)|^2; summed over the window and the group, whose
    outputs add up. What a query sees, and the tiles, are those of `window_mass`.

    Args:
        keys, values: [H, n, D], padded on the right.
        lengths: [H] int64 valid entries.
        tail_keys, tail_values: [H, t, D] behind the valid entries.
        queries: [w, H * G, D] last queries, oldest first.
        scale: softmax scale.
        variant: value, key or joint.

    Returns:
        [H, n] fp32, not negative. Zeros if w is 0.
    """
    num_heads, num_entries, head_size = keys.shape
    num_queries = queries.shape[0]
    result = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=keys.device)
    if num_queries == 0 or num_entries == 0:
        return result
    group = queries.shape[1] // num_heads
    grouped = queries.reshape(num_queries, num_heads, group, head_size).transpose(0, 1)
    columns = WindowColumns.of(lengths, num_entries, tail_keys.shape[1], num_queries)
    valid = valid_entries(lengths, num_entries)
    num_seen = num_entries + tail_keys.shape[1]
    tile = max(1, tile_bytes(keys.device) // (4 * 4 * group * columns.bias.shape[1]))

    def with_window(entries: Tensor, tail: Tensor, head: int) -> Tensor:
        seen = torch.cat([finite(entries[head], valid[head]), tail[head]])
        return torch.cat([seen, seen[columns.places[head]]]).float()

    for head in range(num_heads):
        head_keys = with_window(keys, tail_keys, head)
        head_values = with_window(values, tail_values, head)
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
