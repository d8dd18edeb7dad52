"""The observation window's attention to each entry (SnapKV), in plain torch.

Tiled so that no [heads, window, tokens] tensor exists for long prompts. H = KV heads, G = query
heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import (
    cached_bytes,
    exact_bf16_products,
    head_slices,
)
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.common.window_columns import WindowColumns, by_head
from vllm_kvcompress.kernels.dispatch import by_device

Window = tuple[int, int]  # how many of the last queries, and of how many of these one counts
Numbers = np.ndarray[Any, np.dtype[Any]]
TILE_QUERIES = 64  # at most, so that earlier ones leave out columns that only later ones see


@by_device("window_mass_triton")
def window_mass(
    view: KVView,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
    stride: int = 1,
) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees: the valid entries, the tail, and among the last
    w of these (the window itself) only those not after the query. Queries from before all of
    these (possible once earlier events have dropped entries) count as zero.

    Args:
        view: of a layer.
        queries: [w, H * G, D] last queries, oldest first, in the cache's type.
        scale: softmax scale.
        bias: [H, n] fp32 added to the logits of the full blocks' entries; None: nothing.
        stride: of so many queries one counts, from the last one back.

    Returns:
        [H, n] fp32, mean over the queries that count and the group; at most 1 in sum, 0 behind the
        lengths. Zeros if w is 0.
    """
    return window_masses(view, queries, scale, [(len(queries), stride)], bias)[0]


@by_device("window_mass_triton")
def window_masses(
    view: KVView,
    queries: Tensor,
    scale: float,
    windows: Sequence[Window],
    bias: Tensor | None = None,
) -> Tensor:
    """Of several windows that end together, at once; as `window_mass`.

    A few heads at a time: their keys in fp32, and logits in tiles that stay in a core's cache (or
    of one query's group, if that is more).

    Args:
        view, queries, scale, bias: as there.
        windows: size, at most w, and stride of each.

    Returns:
        [windows, H, n] fp32.
    """
    num_heads, num_entries = view.num_heads, view.capacity
    shape = (num_heads, len(windows), num_entries)
    masses = torch.zeros(shape, dtype=torch.float32, device=view.device)
    if len(queries) == 0 or num_entries == 0:
        return masses.transpose(0, 1)
    counted = _counted(tuple(windows))
    keys, tail_keys = view.keys(), view.tail_keys()
    columns = WindowColumns.of(view, counted.behind, bias)
    grouped = by_head(_rows(queries, counted.behind), num_heads)
    num_queries, group = len(counted.behind), queries.shape[1] // num_heads
    weights = columns.seeing[:, None] * upload(counted.parts / group, view.device)
    weights = weights.repeat_interleave(group, dim=2)
    row_bytes, at_once = 4 * group * columns.num_columns, min(num_queries, TILE_QUERIES)
    slices = head_slices(num_heads, at_once * row_bytes, view.device)
    at_once = min(at_once, max(1, cached_bytes(view.device) // (row_bytes * slices[0].stop)))
    room = masses.new_empty(slices[0].stop * at_once * row_bytes // 4)
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    tiles = counted.tiles(at_once)
    for heads in slices:
        head_keys = columns.seen(heads, view.clean(0, heads), tail_keys[heads])
        sums = masses.new_zeros(len(head_keys), len(windows), columns.num_columns)
        for rows, counting in tiles:
            with exact_bf16_products(exact):
                logits = columns.logits(heads, rows, grouped[heads], head_keys, scale, room)
            torch.softmax(logits, dim=2, out=logits)
            mine = weights[heads, :counting, rows.start * group : rows.stop * group]
            sums[:, :counting, : logits.shape[2]].baddbmm_(mine, logits)
        masses[heads] = columns.fold(heads, sums)
    return masses.transpose(0, 1)


@dataclass(frozen=True)
class _Counted:
    """Queries that count, oldest first.

    Attributes:
        behind: positions from each to the last one.
        parts: [windows, m] fp32 how much each does in each window's mean.
    """

    behind: tuple[int, ...]
    parts: Numbers

    def tiles(self, at_once: int) -> list[tuple[slice, int]]:
        """So many of them, and how many windows they have a part in: small ones are the last."""
        starts = range(0, len(self.behind), at_once)
        rows = [slice(start, min(start + at_once, len(self.behind))) for start in starts]
        return [
            (some, 1 + int(np.flatnonzero(self.parts[:, some].any(axis=1))[-1])) for some in rows
        ]


@lru_cache(maxsize=16)  # the same in all layers
def _counted(windows: tuple[Window, ...]) -> _Counted:
    """Of windows as of `window_masses`."""
    behind = np.arange(max(size for size, _ in windows))[::-1]
    counts = np.stack([(behind < size) & (behind % stride == 0) for size, stride in windows])
    used = counts.any(axis=0)
    parts = counts[:, used] / counts.sum(axis=1, keepdims=True)
    return _Counted(tuple(behind[used].tolist()), parts.astype(np.float32))


def _rows(queries: Tensor, behind: Sequence[int]) -> Tensor:
    """[m, H * G, D] the queries that lie so far behind the last one."""
    if len(behind) == len(queries):
        return queries
    return queries.index_select(0, upload(len(queries) - 1 - np.array(behind), queries.device))
