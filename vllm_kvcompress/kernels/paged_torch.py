"""Kernels over pages in plain torch: they gather the pages and call what works on tensors.

S = sequences (one KV head of one request each), G = query heads of each, D = head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.rotary import Turns, turn
from vllm_kvcompress.kernels.keydiff import reference as keydiff
from vllm_kvcompress.kernels.merging.merge_into import reference as into
from vllm_kvcompress.kernels.merging.moments import reference as moments
from vllm_kvcompress.kernels.merging.nearest_keys import reference as nearest
from vllm_kvcompress.kernels.merging.neighbours import reference as neighbours
from vllm_kvcompress.kernels.merging.spread_values import reference as spread
from vllm_kvcompress.kernels.merging.value_residuals import reference as residuals
from vllm_kvcompress.kernels.value_norms import reference as norms_of
from vllm_kvcompress.kernels.window_mass import reference as mass
from vllm_kvcompress.kernels.window_perturbation import reference as perturbation


def window_mass(
    entries: PagedEntries,
    num_tail: int,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Mean attention of the last queries to each entry (SnapKV's observation window).

    A softmax over everything that a query sees, causal among the last w entries.

    Args:
        entries: S = KV heads of one request; each holds the tail.
        num_tail: last entries of every head, which are seen but get no score.
        queries: [w, S * G, D] last queries, oldest first, in the pages' type.
        scale: softmax scale.
        bias: [S, b] fp32 added to the logits of the first b entries, but not of the tail; None:
            nothing.

    Returns:
        [S, capacity] fp32, mean over the window and the group; 0 for the tail and behind it.
    """
    body = _body(entries, num_tail)
    keys = entries.keys()
    added = None if bias is None else whole_bias(entries, bias)
    tail = _behind(keys, body, num_tail)
    return mass.window_mass(keys, body, tail, queries, scale, added)


def window_perturbation(
    entries: PagedEntries, num_tail: int, queries: Tensor, scale: float, variant: str
) -> Tensor:
    """How much the window's attention outputs would change without an entry (OBCache).

    Args:
        entries: S = KV heads of one request; each holds the tail.
        num_tail: last entries of every head, which are seen but get no score.
        queries: [w, S * G, D] last queries, oldest first, in the pages' type.
        scale: softmax scale.
        variant: value, key or joint, as `kernels.window_perturbation`.

    Returns:
        [S, capacity] fp32, summed over the window and the group; 0 for the tail and behind it.
    """
    body = _body(entries, num_tail)
    keys, values = entries.keys(), entries.values()
    tails = (_behind(keys, body, num_tail), _behind(values, body, num_tail))
    return perturbation.window_perturbation(keys, values, body, *tails, queries, scale, variant)


def keydiff_scores(entries: PagedEntries, anchor: str) -> Tensor:
    """[S, capacity] fp32 minus the cosine between each key and an anchor (KeyDiff).

    Args:
        entries: S = KV heads.
        anchor: mean_normalized, mean_raw, pairwise, or (in torch alone) median.
    """
    return keydiff.keydiff_scores(entries.keys(), entries.flat_lengths, anchor)


def value_norms_l1(entries: PagedEntries, output_weight: Tensor, wanted: Tensor) -> Tensor:
    """[S, capacity] fp32 mean over the group of ||v W_O||_1 per entry (CriticalKV).

    Args:
        entries: S = KV heads.
        output_weight: [S, D, G, M] o_proj, [h, :, g] of query head h * G + g, in the pages' type.
        wanted: [S, capacity] bool; others get 0, as do entries behind the lengths.
    """
    wanted = wanted & entries.valid()
    norms = norms_of.value_norms_l1(entries.values(), output_weight, wanted)
    return norms.masked_fill(~wanted, 0)


def value_norms_l2(entries: PagedEntries, output_gram: Tensor) -> Tensor:
    """[S, capacity] fp32 mean over the group of sqrt(v Q v^T) per entry, with Q = W W^T.

    Args:
        entries: S = KV heads.
        output_gram: [S * G, D, D] fp32.
    """
    return norms_of.value_norms_l2(entries.values(), output_gram)


def add_to_moments(entries: PagedEntries, state: Tensor, evicted: Tensor) -> Tensor:
    """[S, moment_size] fp32 MomentKV's state after a set of entries was evicted, in one batch.

    Args:
        entries: S = KV heads.
        state: [S, moment_size] fp32 before.
        evicted: [S, capacity] bool; entries behind the lengths do not count.
    """
    gone = evicted & entries.valid()
    return moments.add_to_moments(state, entries.keys(), entries.values(), gone)


def moment_residuals(entries: PagedEntries, state: Tensor, scale: float) -> Tensor:
    """[S, capacity] fp32 what MomentKV's state does not predict of values; 0 behind the lengths.

    Args:
        entries: S = KV heads.
        state: [S, moment_size] fp32.
        scale: softmax scale.
    """
    own = (entries.keys(), entries.values())
    found = moments.moment_residuals(state, *own, scale)
    return found.masked_fill(~entries.valid(), 0)


def nearest_keys(entries: PagedEntries, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The highest cosine of each evicted key to a kept one of its head, and which (D2O).

    Args:
        entries: S = KV heads.
        kept: [S, capacity] bool; entries behind the lengths do not count.

    Returns:
        [S, capacity] fp32 cosines and [S, capacity] int64 places, of equals the earlier; 0 for
        entries that are not evicted, and where a head keeps nothing.
    """
    kept = kept & entries.valid()
    return nearest.nearest_keys(entries.keys(), entries.flat_lengths, kept)


def neighbour_cosines(entries: PagedEntries) -> Tensor:
    """[S, capacity] fp32 cosine of each key with the one before it, 0 for the first one.

    0 also for zero keys, and behind the lengths.
    """
    cosines = neighbours.neighbour_cosines(entries.keys())
    return cosines.masked_fill(~entries.valid(), 0)


def key_distances(entries: PagedEntries, others: Tensor) -> Tensor:
    """[S, capacity] fp32 distance of each key from another one's; 0 behind the lengths.

    Args:
        entries: S = KV heads.
        others: [S, capacity] int64 the other one's place, below the length.
    """
    distances = neighbours.key_distances(entries.keys(), others)
    return distances.masked_fill(~entries.valid(), 0)


def value_residuals(entries: PagedEntries, weights: Tensor, order: int, num_pairs: int) -> Tensor:
    """Norms of values less their weighted sum, and of sums of two such residuals.

    Args:
        entries: S = KV heads.
        weights: [S, capacity] fp32; entries behind the lengths do not count.
        order: 1 or 2, of the norms of single residuals.
        num_pairs: how many of the entries behind each one make a pair with it.

    Returns:
        [1 + num_pairs, S, capacity] fp32, as `kernels.value_residuals`; 0 where an entry is
        behind the length.
    """
    valid = entries.valid()
    clean = weights.masked_fill(~valid, 0)
    norms = residuals.value_residuals(entries.values(), clean, order, num_pairs)
    for apart in range(1 + num_pairs):
        norms[apart] = norms[apart] * functional.pad(valid, (0, apart))[:, apart:]
    return norms


def merge_groups(
    entries: PagedEntries,
    link: Tensor,
    key_weights: Tensor,
    value_weights: Tensor,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted means of groups of neighbours, at the place of each group's first entry.

    Args:
        entries: S = KV heads.
        link: [S, capacity] bool: an entry joins the one before it.
        key_weights, value_weights: [S, capacity] fp32, not negative.
        turns: keys are turned before they are merged; None: they are not.

    Returns:
        [S, capacity, D] keys and values in the pages' type: an entry that is a group by itself as
        it is, to the bit; zeros where another entry stands for this one, and behind the lengths.
    """
    valid = entries.valid()
    nth = torch.arange(entries.capacity, device=entries.device).expand_as(link)
    place = torch.where(link, 0, nth).cummax(dim=1).values
    size = torch.zeros_like(place).scatter_add(1, place, valid.long())
    merged: list[Tensor] = []
    for rows, weights in ((entries.keys(), key_weights), (entries.values(), value_weights)):
        wide = rows.float()
        if turns is not None and not merged:
            wide = turn(wide, turns)
        weights = weights.masked_fill(~valid, 0)
        whole = torch.zeros_like(weights).scatter_add(1, place, weights).clamp_min(1e-30)
        index = place[..., None].expand_as(rows)
        sums = torch.zeros_like(rows, dtype=torch.float32)
        sums = sums.scatter_add(1, index, weights[..., None] * wide)
        means = (sums / whole[..., None]).to(rows.dtype)
        merged.append(torch.where((size == 1)[..., None], rows, means))
    return merged[0], merged[1]


def merge_into(
    entries: PagedEntries, kept: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Means of kept entries, of weight 1, and of those that go to them (D2O).

    Args:
        entries: S = KV heads.
        kept: [S, capacity] bool; entries behind the lengths do not count.
        targets: [S, capacity] int64 the kept entry that each one goes to.
        weights: [S, capacity] fp32, not negative; 0 for entries that go nowhere, and behind the
            lengths.

    Returns:
        [S, capacity, D] keys and values in the pages' type; 0 for entries that are not kept.
    """
    gone = ~(kept & entries.valid())[..., None]
    keys, values = (
        into.merge_into(rows, targets, weights).masked_fill(gone, 0)
        for rows in (entries.keys(), entries.values())
    )
    return keys, values


def spread_values(entries: PagedEntries, kept: Tensor, shares: Tensor, num_targets: int) -> Tensor:
    """[S, capacity, D] values with what evicted entries before them give (CaM); 0 if not kept.

    Args:
        entries: S = KV heads.
        kept: [S, capacity] bool; entries behind the lengths do not count.
        shares: [S, capacity] fp32 part of a value that each of the next `num_targets` kept
            entries gets; 0 for kept entries, anything behind the lengths.
        num_targets: fewer where not so many follow.
    """
    valid = entries.valid()
    kept, shares = kept & valid, shares.masked_fill(~valid, 0)
    values = spread.spread_values(entries.values(), kept, shares, num_targets)
    return values.masked_fill(~kept[..., None], 0)


def whole_bias(entries: PagedEntries, bias: Tensor) -> Tensor:
    """[S, b] -> [S, capacity]: zeros for entries without one, and behind the lengths."""
    missing = max(0, entries.capacity - bias.shape[1])
    wide = functional.pad(bias, (0, missing))[:, : entries.capacity]
    return wide.masked_fill(~entries.valid(), 0)


def _body(entries: PagedEntries, num_tail: int) -> Tensor:
    """[S] int64 entries before the tail."""
    return (entries.flat_lengths - num_tail).clamp_min(0).to(torch.int64)


def _behind(rows: Tensor, body: Tensor, num_tail: int) -> Tensor:
    """[S, num_tail, D] the tail's rows of [S, capacity, D]."""
    places = body[:, None] + torch.arange(num_tail, device=rows.device)
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[2]))
