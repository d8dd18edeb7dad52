"""The observation window's attention to each entry (SnapKV), in plain torch.

Tiled so that no [heads, window, tokens] tensor exists for long prompts. H = KV heads, G = query
heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.tiles import (
    exact_bf16_products,
    finite,
    tile_bytes,
    valid_entries,
)
from vllm_kvcompress.kernels.common.window_columns import HIDDEN, WindowColumns


def window_mass(
    keys: Tensor,
    lengths: Tensor,
    tail_keys: Tensor,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees: the valid entries, the tail, and among the last
    w of these (the window itself) only those not after the query. Queries from before all of
    these (possible once earlier events have dropped entries) count as zero.

    One head at a time: its keys in fp32, and logits in tiles of at most `TILE_BYTES` (or of
    one query's group, if that is more).

    Args:
        keys: [H, n, D] keys, padded on the right.
        lengths: [H] int64 valid entries.
        tail_keys: [H, t, D] keys behind the valid entries.
        queries: [w, H * G, D] last queries, oldest first.
        scale: softmax scale.
        bias: [H, n] fp32 added to the entries' logits; None: nothing.

    Returns:
        [H, n] fp32, mean over the window and the group; at most 1 in sum. Zeros if w is 0.
    """
    num_heads, num_entries, head_size = keys.shape
    num_queries = queries.shape[0]
    mass = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=keys.device)
    if num_queries == 0 or num_entries == 0:
        return mass
    group = queries.shape[1] // num_heads
    grouped = queries.reshape(num_queries, num_heads, group, head_size).transpose(0, 1)
    columns = WindowColumns.of(lengths, num_entries, tail_keys.shape[1], num_queries, bias)
    valid = valid_entries(lengths, num_entries)
    num_seen = num_entries + tail_keys.shape[1]
    num_columns = columns.bias.shape[1]
    tile = min(num_queries, max(1, tile_bytes(keys.device) // (4 * group * num_columns)))
    logits, weights = mass.new_empty(2, tile * group, num_columns)
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    for head in range(num_heads):
        head_keys = torch.cat([finite(keys[head], valid[head]), tail_keys[head]])
        head_keys = torch.cat([head_keys, head_keys[columns.places[head]]]).float().t()
        for start in range(0, num_queries, tile):
            rows = slice(start, start + tile)
            mine = grouped[head, rows].float().flatten(0, 1)
            out = logits[: mine.shape[0]]
            with exact_bf16_products(exact):
                torch.addmm(columns.bias[head], mine, head_keys, alpha=scale, out=out)
            window = out.unflatten(0, (-1, group))[..., num_seen:]
            window.masked_fill_(columns.hidden[head, rows, None], HIDDEN)
            seeing = columns.seeing[head, rows].repeat_interleave(group)
            sums = seeing @ torch.softmax(out, dim=1, out=weights[: mine.shape[0]])
            mass[head] += columns.fold(head, sums)
    return mass / (num_queries * group)
