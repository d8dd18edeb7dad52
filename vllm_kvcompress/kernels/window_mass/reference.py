"""The observation window's attention to each entry (SnapKV), in plain torch.

Tiled so that no [heads, window, tokens] tensor exists for long prompts. H = KV heads, G = query
heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import (
    cached_bytes,
    exact_bf16_products,
    finite,
    head_slices,
)
from vllm_kvcompress.kernels.common.window_columns import WindowColumns, by_head


def window_mass(view: KVView, queries: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees: the valid entries, the tail, and among the last
    w of these (the window itself) only those not after the query. Queries from before all of
    these (possible once earlier events have dropped entries) count as zero.

    Args:
        view: of a layer.
        queries: [w, H * G, D] last queries, oldest first, in the cache's type.
        scale: softmax scale.
        bias: [H, n] fp32 added to the logits of the full blocks' entries; None: nothing.

    Returns:
        [H, n] fp32, mean over the window and the group; at most 1 in sum, 0 behind the lengths.
        Zeros if w is 0.
    """
    return window_masses(view, queries, scale, (len(queries),), bias)[0]


def window_masses(
    view: KVView,
    queries: Tensor,
    scale: float,
    sizes: Sequence[int],
    bias: Tensor | None = None,
) -> Tensor:
    """Of several windows that end together, at once; as `window_mass`.

    A few heads at a time: their keys in fp32, and logits in tiles that stay in a core's cache (or
    of one query's group, if that is more).

    Args:
        view, queries, scale, bias: as there.
        sizes: of the windows, at most w.

    Returns:
        [windows, H, n] fp32.
    """
    num_heads, num_entries, num_queries = view.num_heads, view.capacity, len(queries)
    shape = (num_heads, len(sizes), num_entries)
    masses = torch.zeros(shape, dtype=torch.float32, device=view.device)
    if num_queries == 0 or num_entries == 0:
        return masses.transpose(0, 1)
    keys, tail_keys = view.keys(), view.tail_keys()
    columns = WindowColumns.of(view, num_queries, bias)
    grouped = by_head(queries, num_heads)
    group = grouped.shape[1] // num_queries
    counted = _counted(columns.seeing, sizes, group)
    row_bytes = 4 * group * columns.num_columns
    slices = head_slices(num_heads, num_queries * row_bytes, view.device)
    tile = max(1, cached_bytes(view.device) // (row_bytes * slices[0].stop))
    room = masses.new_empty(slices[0].stop * min(tile, num_queries) * row_bytes // 4)
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    for heads in slices:
        head_keys = columns.seen(heads, finite(keys[heads], view.valid[heads]), tail_keys[heads])
        sums = masses.new_zeros(len(head_keys), len(sizes), columns.num_columns)
        for start in range(0, num_queries, tile):
            rows = slice(start, min(start + tile, num_queries))
            with exact_bf16_products(exact):
                logits = columns.logits(heads, rows, grouped[heads], head_keys, scale, room)
            torch.softmax(logits, dim=2, out=logits)
            mine = counted[heads, :, rows.start * group : rows.stop * group]
            sums[..., : logits.shape[2]].baddbmm_(mine, logits)
        masses[heads] = columns.fold(heads, sums)
    return masses.transpose(0, 1)


def _counted(seeing: Tensor, sizes: Sequence[int], group: int) -> Tensor:
    """[H, windows, w * G] what a query's attention counts for in the mean of each window.

    Args:
        seeing: [H, w] 0 for a query that sees nothing.
        sizes: of the windows.
        group: G.
    """
    parts = torch.zeros(len(sizes), seeing.shape[1], device=seeing.device)
    for part, size in zip(parts, sizes, strict=True):
        part[len(part) - size :] = 1 / (size * group)
    return (seeing[:, None] * parts).repeat_interleave(group, dim=2)
