"""The observation window's attention to each entry (SnapKV), in plain torch.

Tiled so that no [heads, window, tokens] tensor exists for long prompts. H = KV heads, G = query
heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.alibi import Alibi
from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import cached_bytes, exact_bf16_products, head_slices
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.dispatch import by_device, twin
from vllm_kvcompress.rounding import ceil_div

Window = tuple[int, int]  # number of last queries, and stride between those that count
HIDDEN = -1e30  # logit without weight; unlike -inf it gives no NaN where all are hidden
Numbers = np.ndarray[Any, np.dtype[Any]]
MAX_TILE_QUERIES = 64  # so that earlier queries skip columns that only later ones see


@by_device("window_mass_triton")
def window_mass(
    view: KVView,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
    stride: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees: the valid entries, the tail, and among the last
    w of these (the window itself) only those not after the query. Queries from before all of
    these (possible once earlier events have dropped entries) count as zero.

    Args:
        queries: [w, H * G, D] last queries, oldest first, in the cache's type.
        scale: softmax scale.
        bias: [H, n] fp32 added to the logits of the full blocks' entries; None: none.
        stride: every `stride`-th query counts, from the last one back.
        sinks: [H, G] logits that take part in every softmax and are no entry; None: none.

    Returns:
        [H, n] fp32, mean over the queries that count and the group; at most 1 in sum, 0 behind the
        lengths. Zeros if w is 0.
    """
    windows = [(len(queries), stride)]
    return twin(window_masses)(view, queries, scale, windows, bias, sinks)[0]


@by_device("window_mass_triton")
def window_masses(
    view: KVView,
    queries: Tensor,
    scale: float,
    windows: Sequence[Window],
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `window_mass` of several windows that end together, at once.

    A few heads at a time: their keys in fp32, and logits in tiles that stay in the cores' caches
    (or of one query's group, if that is more).

    Args:
        view, queries, scale, bias, sinks: those of `window_mass`.
        windows: size, at most w, and stride of each.

    Returns:
        [windows, H, n] fp32.
    """
    return _masses(view, queries, scale, _counted(tuple(windows)), bias, sinks)


def window_masses_by_distance(
    view: KVView,
    queries: Tensor,
    scale: float,
    windows: Sequence[Window],
    alibi: Alibi,
    positions: Tensor,
    ends: Tensor,
) -> Tensor:
    """Computes `window_masses` where the model biases attention by distance.

    Args:
        view, queries, scale, windows: those of `window_masses`.
        alibi: the biases of the H heads.
        positions: [H, n] int64 of the entries; those of the tail end at `ends`.
        ends: [H] int64 tokens that each head's request has read.

    Returns:
        [windows, H, n] fp32.
    """
    counted = _counted(tuple(windows))
    first_of_tail = (ends - view.tails)[:, None]
    tail = first_of_tail + torch.arange(view.num_tail, device=view.device)
    keys = torch.cat([positions, tail], dim=1)
    own = ends[:, None] - 1 - upload(list(counted.behind), view.device)
    return _masses(view, queries, scale, counted, None, None, _Distances(alibi, own, keys))


@dataclass(frozen=True)
class _Distances:
    """Biases by distance, and the positions of queries and keys.

    Attributes:
        alibi: the biases of H heads.
        queries: [H, m] int64 positions of the queries that count.
        keys: [H, n + t] int64 positions of entries and tail.
    """

    alibi: Alibi
    queries: Tensor
    keys: Tensor

    def add(self, logits: Tensor, columns: WindowColumns, heads: slice, rows: slice) -> None:
        """Adds the biases to the [heads, rows * G, C] logits of some columns, in place."""
        keys = self.keys[heads]
        if columns.places is not None:
            keys = keys.gather(1, columns.places[heads])
        alibi = replace(self.alibi, slopes=self.alibi.slopes[heads])
        bias = alibi.bias(self.queries[heads, rows], keys).transpose(1, 2)
        logits.unflatten(1, bias.shape[1:3]).add_(bias)


def _masses(
    view: KVView,
    queries: Tensor,
    scale: float,
    counted: _Counted,
    bias: Tensor | None,
    sinks: Tensor | None,
    distances: _Distances | None = None,
) -> Tensor:
    """Returns the [windows, H, n] masses of the windows that `counted` lists."""
    num_heads, num_windows = view.num_heads, len(counted.parts)
    shape = (num_heads, num_windows, view.capacity)
    masses = torch.zeros(shape, dtype=torch.float32, device=view.device)
    if len(queries) == 0 or view.capacity == 0:
        return masses.transpose(0, 1)
    keys, tail_keys = view.keys(), view.tail_keys()
    columns = WindowColumns.of(view, counted.behind, bias)
    grouped = by_head(_rows(queries, counted.behind), num_heads)
    num_queries, group = len(counted.behind), queries.shape[1] // num_heads
    weights = columns.seeing[:, None] * upload(counted.parts / group, view.device)
    weights = weights.repeat_interleave(group, dim=2)
    slices, at_once = columns.tiling(num_heads, num_queries, group)
    room = masses.new_empty(slices[0].stop * at_once * group * columns.num_columns)
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    tiles = counted.tiles(at_once)
    for heads in slices:
        head_keys = columns.seen(heads, keys[heads], tail_keys[heads])
        sums = masses.new_zeros(len(head_keys), num_windows, columns.num_columns)
        for rows, counting in tiles:
            with exact_bf16_products(exact):
                logits = columns.logits(heads, rows, grouped[heads], head_keys, scale, room)
            if distances is not None:
                distances.add(logits, columns, heads, rows)
            shares = weights[heads, :counting, rows.start * group : rows.stop * group]
            if sinks is not None:
                of_rows = sinks[heads].repeat(1, logits.shape[1] // group)
                shares = shares * torch.sigmoid(logits.logsumexp(dim=2) - of_rows)[:, None]
            torch.softmax(logits, dim=2, out=logits)
            sums[:, :counting].baddbmm_(shares, logits)
        masses[heads] = columns.fold(heads, sums)
    return masses.transpose(0, 1)


@dataclass(frozen=True)
class _Counted:
    """Queries that count, oldest first.

    Attributes:
        behind: positions from each query to the last one.
        parts: [windows, m] fp32 weight of each query in each window's mean.
    """

    behind: tuple[int, ...]
    parts: Numbers

    def tiles(self, at_once: int) -> list[tuple[slice, int]]:
        """Slices of queries, and how many windows each has a weight in; small windows are last."""
        starts = range(0, len(self.behind), at_once)
        rows = [slice(start, min(start + at_once, len(self.behind))) for start in starts]
        return [
            (some, 1 + int(np.flatnonzero(self.parts[:, some].any(axis=1))[-1])) for some in rows
        ]


@lru_cache(maxsize=16)  # the same in all layers
def _counted(windows: tuple[Window, ...]) -> _Counted:
    """Lists the queries that any window counts."""
    behind = np.arange(max(size for size, _ in windows))[::-1]
    counts = np.stack([(behind < size) & (behind % stride == 0) for size, stride in windows])
    used = counts.any(axis=0)
    parts = counts[:, used] / counts.sum(axis=1, keepdims=True)
    return _Counted(tuple(behind[used].tolist()), parts.astype(np.float32))


def _rows(queries: Tensor, behind: Sequence[int]) -> Tensor:
    """[m, H * G, D] queries at the given distances behind the last one."""
    if len(behind) == len(queries):
        return queries
    return queries.index_select(0, upload(len(queries) - 1 - np.array(behind), queries.device))


@dataclass(frozen=True)
class WindowColumns:
    """Columns of logits: the tokens of a head in their order, the latest in the last column.

        the longest head:   | 0  1  2  3 .............. total - 1 |
        another one:        |  hidden  | 0  1  2 ...... total - 1 |

    So the window's own columns are the last ones in all heads. Only these need a causal mask, the
    same for all.

    Attributes:
        num_columns: C, of the longest head, and no less than w - 1.
        places: [H, C] index into entries and tail together, in hidden columns that of the head's
            last token; None: column c is entry c.
        bias: [H, C] added to logits, hides columns without a token; None: nothing is added.
        seeing: [H, w] fp32, 0 for a query that sees nothing.
        empty: [H, 1] bool, heads without a token; None: there are none.
        behind: positions from each query to the last one.
        later: [w, behind[0]] added to the window's own columns, hides later tokens from a query.
        num_entries: n.
    """

    num_columns: int
    places: Tensor | None
    bias: Tensor | None
    seeing: Tensor
    empty: Tensor | None
    behind: Sequence[int]
    later: Tensor
    num_entries: int

    @classmethod
    def of(
        cls, view: KVView, behind: Sequence[int], entry_bias: Tensor | None = None
    ) -> WindowColumns:
        """Lays out the columns of a view.

        Args:
                behind: as above; from the oldest query to the last, which is 0 behind itself.
            entry_bias: [H, n] biases of the entries, if they have any.
        """
        device, lengths, num_entries = view.device, view.lengths[:, None], view.capacity
        total = lengths + view.tails[:, None]
        num_columns = max(num_entries + view.num_tail, behind[0])
        away = upload(list(behind), device)
        seeing = (total > away).float()
        later = upload(_later(tuple(behind)), device)
        places = bias = empty = None
        if entry_bias is not None:
            bias = functional.pad(entry_bias, (0, view.num_tail))
        # Only the CPU can look without waiting for a device.
        if device.type != "cpu" or bool((total < num_columns).any()):
            tokens = total + torch.arange(-num_columns, 0, device=device)
            shown = torch.where(tokens < 0, total - 1, tokens)
            in_tail = shown - lengths + num_entries
            places = torch.where(shown < lengths, shown, in_tail).clamp_min_(0)
            empty = total == 0
            empty = empty if device.type != "cpu" or bool(empty.any()) else None
            zeros = torch.zeros_like(tokens, dtype=torch.float32)
            bias = zeros if bias is None else bias.gather(1, places)
            bias = bias.masked_fill_(tokens < 0, HIDDEN)
        return cls(num_columns, places, bias, seeing, empty, behind, later, num_entries)

    def tiling(self, num_heads: int, num_queries: int, group: int) -> tuple[list[slice], int]:
        """Returns heads that are gone through at once, and the most queries of a tile of theirs."""
        device, row_bytes = self.later.device, 4 * group * self.num_columns
        at_once = min(num_queries, MAX_TILE_QUERIES)
        slices = head_slices(num_heads, at_once * row_bytes, device)
        most = max(1, cached_bytes(device) // (row_bytes * slices[0].stop))
        return slices, ceil_div(num_queries, ceil_div(num_queries, most))  # tiles of one size

    def seen(self, heads: slice, entries: Tensor, tail: Tensor) -> Tensor:
        """[heads, C, D] fp32 keys or values of the columns, from the entries' and the tail's.

        Entries behind a head's length may hold anything.
        """
        if self.places is not None:
            rows = torch.cat([entries, tail], dim=1) if tail.shape[1] else entries
            places = self.places[heads]
            firsts = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
            rows = rows.flatten(0, 1).index_select(0, (places + firsts).flatten())
            rows = rows.unflatten(0, places.shape).float()
            if self.empty is not None:
                rows.masked_fill_(self.empty[heads, None], 0.0)
            return rows
        if not tail.shape[1]:
            return entries.float()
        num_rows = entries.shape[1] + tail.shape[1]
        rows = entries.new_empty(len(entries), num_rows, entries.shape[2], dtype=torch.float32)
        rows[:, : entries.shape[1]], rows[:, entries.shape[1] :] = entries, tail
        return rows

    def logits(
        self, heads: slice, rows: slice, queries: Tensor, keys: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """[heads, rows * G, C] logits.

        Args:
            heads, rows: slices of the heads and of the queries.
            queries: [heads, w * G, D] fp32.
            keys: from `seen`.
            scale: softmax scale.
            out: memory for at least as many numbers as are returned.
        """
        group = queries.shape[1] // len(self.behind)
        tile = queries[:, rows.start * group : rows.stop * group]
        shape = (*tile.shape[:2], self.num_columns)
        out = out[: math.prod(shape)].view(shape)
        if self.bias is None:
            torch.baddbmm(out, tile, keys.mT, beta=0, alpha=scale, out=out)
        else:
            torch.baddbmm(self.bias[heads, None], tile, keys.mT, alpha=scale, out=out)
        own = out.unflatten(1, (-1, group))[..., self.num_columns - self.behind[0] :]
        own += self.later[rows, None]
        return out

    def fold(self, heads: slice, sums: Tensor) -> Tensor:
        """Moves [heads, any, C] columns to [heads, any, n] entries, 0 where there is no column."""
        if self.places is not None:
            places = self.places[heads, None].expand_as(sums)
            sums = sums.new_zeros(sums.shape).scatter_add_(2, places, sums)
        return sums[..., : self.num_entries]


@lru_cache(maxsize=2)  # the same in all layers
def _later(behind: tuple[int, ...]) -> Numbers:
    """[w, behind[0]] the field `WindowColumns.later`."""
    hidden = np.arange(behind[0], 0, -1) <= np.array(behind)[:, None]
    added: Numbers = hidden * np.float32(HIDDEN)
    return added


def by_head(queries: Tensor, num_heads: int) -> Tensor:
    """Reorders [w, H * G, D] queries as [H, w * G, D] fp32."""
    return queries.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(1, 2).float()
