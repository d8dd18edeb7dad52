"""The observation window's attention to each entry (SnapKV), in plain torch.

Tiled so that no [heads, window, tokens] tensor exists for long prompts. H = KV heads, G = query
heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import (
    exact_bf16_products,
    finite,
    head_slices,
    tile_bytes,
)
from vllm_kvcompress.kernels.common.window_columns import WindowColumns


def window_mass(
    view: KVView,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees: the valid entries, the tail, and among the last
    w of these (the window itself) only those not after the query. Queries from before all of
    these (possible once earlier events have dropped entries) count as zero.

    A few heads at a time: their keys in fp32, and logits in tiles of at most `TILE_BYTES` (or of
    one query's group, if that is more).

    Args:
        view: of a layer.
        queries: [w, H * G, D] last queries, oldest first, in the cache's type.
        scale: softmax scale.
        bias: [H, n] fp32 added to the logits of the full blocks' entries; None: nothing.

    Returns:
        [H, n] fp32, mean over the window and the group; at most 1 in sum, 0 behind the lengths.
        Zeros if w is 0.
    """
    num_heads, num_entries = view.num_heads, view.capacity
    num_queries = queries.shape[0]
    mass = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=view.device)
    if num_queries == 0 or num_entries == 0:
        return mass
    group = queries.shape[1] // num_heads
    grouped = queries.reshape(num_queries, num_heads, group, view.head_size).transpose(0, 1)
    keys, tail_keys = view.keys(), view.tail_keys()
    columns = WindowColumns.of(view, num_queries, bias)
    row_size = group * columns.bias.shape[1]
    slices = head_slices(num_heads, 8 * num_queries * row_size, view.device)
    at_once = slices[0].stop
    tile = min(num_queries, max(1, tile_bytes(view.device) // (4 * row_size * at_once)))
    out, weights = mass.new_empty(2, at_once * tile * row_size)
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    for heads in slices:
        head_keys = columns.seen(heads, finite(keys[heads], view.valid[heads]), tail_keys[heads])
        for start in range(0, num_queries, tile):
            rows = slice(start, start + tile)
            mine = grouped[heads, rows].float()
            with exact_bf16_products(exact):
                logits = columns.logits(heads, rows, mine, head_keys, scale, out)
            softmax = weights[: logits.numel()].view_as(logits)
            torch.softmax(logits, dim=2, out=softmax)
            seeing = columns.seeing[heads, rows].repeat_interleave(group, dim=1)
            mass[heads] += columns.fold(heads, (seeing[:, None] @ softmax)[:, 0])
    return mass / (num_queries * group)
