"""Scores in plain torch, tiled so that no [heads, window, tokens] tensor exists for long prompts.

H = KV heads, G = query heads per KV head, D = head size, n = entries, w = queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TILE_BYTES = 1 << 23  # largest temporary; reused, since fresh memory costs more than the work
DEVICE_TILE_BYTES = 1 << 27  # the same off the CPU: every tile takes some launches
FEWEST_ROWS = 512  # of a matrix product whose other factor is large: it is packed every time
HIDDEN = -1e30  # a logit of no weight; unlike -inf it gives no NaN where everything is hidden


def valid_entries(lengths: Tensor, num_entries: int) -> Tensor:
    """[H, n] bool: entries below each head's length."""
    return torch.arange(num_entries, device=lengths.device) < lengths[:, None]


def tile_bytes(device: torch.device) -> int:
    """Largest temporary on a device."""
    return TILE_BYTES if device.type == "cpu" else DEVICE_TILE_BYTES


@contextmanager
def exact_bf16_products(dtype: torch.dtype) -> Iterator[None]:
    """Lets fp32 matrix products on the CPU use its bf16 units, where nothing is lost by it.

    Tensors that were widened from bf16 convert back without loss, and sums stay fp32: the same
    result several times faster, which bf16 tensors cannot ask for on the CPU (their products are
    rounded to bf16). For any other `dtype` nothing changes.

    Args:
        dtype: what both factors were before they were widened.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


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


@dataclass(frozen=True)
class WindowColumns:
    """Where the last w - 1 visible entries are: only these need a causal mask.

    They are appended to the keys as columns of their own, and hidden at their usual places, so
    that the mask is [w, w - 1] and not [w, n].

    Attributes:
        places: [H, w - 1] index into entries and tail together.
        bias: [H, n + t + w - 1] added to logits: hides padding and the places above.
        hidden: [H, w, w - 1] bool: not yet there when the query was asked.
        seeing: [H, w] fp32, 0 for a query that sees nothing.
        num_entries: n.
    """

    places: Tensor
    bias: Tensor
    hidden: Tensor
    seeing: Tensor
    num_entries: int

    @classmethod
    def of(
        cls,
        lengths: Tensor,
        num_entries: int,
        num_tail: int,
        num_queries: int,
        entry_bias: Tensor | None = None,
    ) -> WindowColumns:
        """For [H] lengths, and a bias [H, n] of the entries, if they have one."""
        device = lengths.device
        total = (lengths + num_tail)[:, None]
        nth = total - torch.arange(num_queries - 1, 0, -1, device=device)
        exists = nth >= 0
        places = torch.where(nth < lengths[:, None], nth, nth - lengths[:, None] + num_entries)
        places = places.clamp_min(0)
        bias = torch.zeros(lengths.numel(), num_entries + num_tail + num_queries - 1, device=device)
        if entry_bias is not None:
            bias[:, :num_entries] = entry_bias
            bias[:, num_entries + num_tail :] = bias.gather(1, places)
        bias[:, :num_entries].masked_fill_(~valid_entries(lengths, num_entries), HIDDEN)
        # Entries that do not exist all share place 0, which is then one of the window's own.
        bias.scatter_(1, places, HIDDEN)
        query = torch.arange(num_queries, device=device)
        after = torch.arange(num_queries - 1, device=device) >= query[:, None]
        hidden = after | ~exists[:, None]
        seeing = (total - (num_queries - 1 - query) > 0).float()
        return cls(places, bias, hidden, seeing, num_entries)

    def fold(self, head: int, sums: Tensor) -> Tensor:
        """[n + t + w - 1] column sums -> [n], the window's columns at their places."""
        num_own = self.places.shape[1]
        whole = sums[: sums.numel() - num_own]
        if num_own:
            whole = whole.scatter_add(0, self.places[head], sums[sums.numel() - num_own :])
        return whole[: self.num_entries]


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


def value_norms_l1(values: Tensor, output_weight: Tensor, wanted: Tensor) -> Tensor:
    """Mean over the group of ||v W_O||_1 per entry (CriticalKV, arXiv 2502.03805, Alg. 1).

    The projected values are never stored: entries go in tiles, a group's heads side by side.

    Args:
        values: [H, n, D].
        output_weight: [H, D, G, M] o_proj, [h, :, g] of query head h * G + g.
        wanted: [H, n] bool; the norms of other entries may be left out.

    Returns:
        [H, n] fp32; 0 where left out.
    """
    num_heads, num_entries, _ = values.shape
    group = output_weight.shape[2]
    weight = output_weight.flatten(2)
    width = weight.shape[2]
    norms = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=values.device)
    rows = min(
        num_entries, max(FEWEST_ROWS, tile_bytes(values.device) // (width * values.element_size()))
    )
    # Sums of 16-bit numbers are accumulated in fp32 but returned in 16 bits, which is several
    # times faster than a sum in fp32; over several stretches the rounding averages out.
    stretch = math.gcd(width, 1024)
    projected = values.new_empty(rows, width)
    for head in range(num_heads):
        for places in _some_entries(wanted[head]).split(rows):
            out = projected[: places.numel()]
            torch.mm(values[head, places], weight[head], out=out).abs_()
            partial = out.unflatten(1, (-1, stretch)).sum(2)
            norms[head, places] = partial.sum(1, dtype=torch.float32)
    return norms / group


def _some_entries(wanted: Tensor) -> Tensor:
    """Places of the wanted ones; of all where counting them would wait for a device."""
    if wanted.device.type == "cpu":
        return wanted.nonzero()[:, 0]
    return torch.arange(wanted.numel(), device=wanted.device)


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
    rows = max(1, tile_bytes(values.device) // max(1, 4 * num_heads * head_size))
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
    num_heads, num_entries, head_size = keys.shape
    rows = max(1, tile_bytes(keys.device) // (4 * num_heads * head_size))
    valid = valid_entries(lengths, num_entries)
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
    dots *= inverse
    return -dots * count if anchor == "pairwise" else -dots / length


def finite(keys: Tensor, valid: Tensor) -> Tensor:
    """Keys with zeros for padding, which may hold anything.

    The same tensor where there is no padding and asking for it does not wait for a device.
    """
    if valid.device.type == "cpu" and bool(valid.all()):
        return keys
    return keys.masked_fill(~valid[..., None], 0.0)


def _median(keys: Tensor, valid: Tensor) -> Tensor:
    """[D] median of each coordinate over the valid keys (the lower one of two)."""
    return keys.float().masked_fill_(~valid[:, None], float("nan")).nanmedian(dim=0).values
