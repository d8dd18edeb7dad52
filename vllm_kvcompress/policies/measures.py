"""What policies compute from a layer's entries: over its pages where kernels read these.

Else over gathered keys and values. H = KV heads, n = padded number of entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress import kernels
from vllm_kvcompress.kernels import paged
from vllm_kvcompress.kernels.common.tiles import finite
from vllm_kvcompress.policies.base import LayerView


def observed_mass(view: LayerView) -> Tensor:
    """[H, n] fp32 mean attention of the observed queries to each entry, as `window_mass`."""
    pages = view.pages
    if pages is None:
        return kernels.window_mass(
            view.keys, view.lengths, view.tail_keys, view.queries, view.scale, view.bias
        )
    mass = paged.window_mass(pages.whole, pages.num_tail, view.queries, view.scale, view.bias)
    return mass[:, : view.num_entries]


def perturbations(view: LayerView, variant: str) -> Tensor:
    """[H, n] fp32 change of the observed queries' outputs without an entry.

    As `kernels.window_perturbation`.
    """
    pages = view.pages
    if pages is None:
        own, tail = (view.keys, view.values), (view.tail_keys, view.tail_values)
        return kernels.window_perturbation(
            *own, view.lengths, *tail, view.queries, view.scale, variant
        )
    whole = (pages.whole, pages.num_tail, view.queries, view.scale, variant)
    return paged.window_perturbation(*whole)[:, : view.num_entries]


def key_differences(view: LayerView, anchor: str) -> Tensor:
    """[H, n] fp32 minus the cosine between each key and an anchor, as `keydiff_scores`.

    The median has no kernel over pages.
    """
    if view.pages is None or anchor == "median":
        return kernels.keydiff_scores(view.keys, view.lengths, anchor)
    return paged.keydiff_scores(view.pages.body, anchor)


def value_norms_l1(view: LayerView, wanted: Tensor) -> Tensor:
    """[H, n] fp32 mean over the group of ||v W_O||_1; 0 where not `wanted` ([H, n] bool)."""
    assert view.output_weight is not None
    if view.pages is None:
        return kernels.value_norms_l1(view.values, view.output_weight, wanted)
    return paged.value_norms_l1(view.pages.body, view.output_weight, wanted)


def value_norms_l2(view: LayerView) -> Tensor:
    """[H, n] fp32 mean over the group of ||v W_O||_2."""
    assert view.output_gram is not None
    if view.pages is None:
        return kernels.value_norms_l2(view.values, view.output_gram)
    return paged.value_norms_l2(view.pages.body, view.output_gram)


def moments_with(view: LayerView, state: Tensor, evicted: Tensor) -> Tensor:
    """[H, moment_size] fp32 the state with `evicted` entries ([H, n] bool) added."""
    if view.pages is not None:
        return paged.add_to_moments(view.pages.body, state, evicted)
    # Head by head, so that temporaries stay in the cache.
    heads = [slice(head, head + 1) for head in range(view.num_heads)]
    return torch.cat(
        [kernels.add_to_moments(state[h], view.keys[h], view.values[h], evicted[h]) for h in heads]
    )


def moment_residuals(view: LayerView, state: Tensor) -> Tensor:
    """[H, n] fp32 what a state of moments does not predict of values."""
    if view.pages is not None:
        return paged.moment_residuals(view.pages.body, state, view.scale)
    # Head by head, so that temporaries stay in the cache.
    heads = [slice(head, head + 1) for head in range(view.num_heads)]
    return torch.cat(
        [
            kernels.moment_residuals(state[h], view.keys[h], view.values[h], view.scale)
            for h in heads
        ]
    )


def nearest_keys(view: LayerView, kept: Tensor) -> tuple[Tensor, Tensor]:
    """[H, n] fp32 the highest cosine of each evicted key to a kept one, and [H, n] int64 which.

    0 for entries that are not evicted.
    """
    if view.pages is None:
        return kernels.nearest_keys(view.keys, view.lengths, kept)
    cosines, places = paged.nearest_keys(view.pages.body, kept)
    return cosines, places


def neighbour_cosines(view: LayerView) -> Tensor:
    """[H, n] fp32 cosine of each key with the one before it; 0 for the first, and padding any."""
    if view.pages is not None:
        return paged.neighbour_cosines(view.pages.body)
    parts = [
        kernels.neighbour_cosines(finite(view.keys[h], view.valid[h])) for h in view.head_slices()
    ]
    return torch.cat(parts)


def key_distances(view: LayerView, others: Tensor) -> Tensor:
    """[H, n] fp32 distance of each key from that at another place of its head ([H, n])."""
    if view.pages is not None:
        return paged.key_distances(view.pages.body, others)
    return kernels.key_distances(finite(view.keys, view.valid), others)


def value_residuals(view: LayerView, weights: Tensor, order: int, num_pairs: int = 0) -> Tensor:
    """[1 + num_pairs, H, n] fp32 norms of values less their sum weighted by [H, n], and of pairs.

    As `kernels.value_residuals`.
    """
    if view.pages is not None:
        return paged.value_residuals(view.pages.body, weights, order, num_pairs)
    return kernels.value_residuals(finite(view.values, view.valid), weights, order, num_pairs)


def merged_groups(
    view: LayerView,
    link: Tensor,
    key_weights: Tensor,
    value_weights: Tensor,
    steps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[H, n, D] keys and values of groups of neighbours, as `paged_torch.merge_groups`.

    Args:
        view: of a layer whose kernels read pages.
        link: [H, n] bool: an entry joins the one before it.
        key_weights, value_weights: [H, n] fp32, not negative.
        steps: [H, n] int64 positions by which keys are turned before; None: they are not.
    """
    assert view.pages is not None
    turns = None
    if steps is not None:
        assert view.rotary is not None
        turns = view.rotary.turns(steps)
    keys, values = paged.merge_groups(view.pages.body, link, key_weights, value_weights, turns)
    return keys, values


def spread_values(view: LayerView, kept: Tensor, shares: Tensor, num_targets: int) -> Tensor:
    """[H, n, D] values; kept ones with the shares of those before, as `kernels.spread_values`."""
    if view.pages is not None:
        return paged.spread_values(view.pages.body, kept, shares.float(), num_targets)
    parts = []
    for h in view.head_slices():
        values = finite(view.values[h], view.valid[h])
        parts.append(kernels.spread_values(values, kept[h], shares[h], num_targets))
    return torch.cat(parts)


def merged_into(
    view: LayerView, kept: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """[H, n, D] keys and values; kept ones with those that go to them, as `kernels.merge_into`."""
    if view.pages is not None:
        keys, values = paged.merge_into(view.pages.body, kept, targets, weights)
        return keys, values
    merged = []
    for rows in (view.keys, view.values):
        parts = []
        for h in view.head_slices():
            clean = finite(rows[h], view.valid[h])
            parts.append(kernels.merge_into(clean, targets[h], weights[h]))
        merged.append(torch.cat(parts))
    return merged[0], merged[1]
