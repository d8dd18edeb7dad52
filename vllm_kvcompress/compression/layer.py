"""One request, one layer: what every head keeps, and what becomes of the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Merged, Selection
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.pipeline import Pipeline

# Of every entry, what a later event is told again; mergers may change it.
_REMEMBERED = ("accumulated", "observed", "positions")


def compress_layer(pipeline: Pipeline, view: LayerView, total_pages: int) -> Selection:
    """Decides what every head of a layer keeps.

    Args:
        pipeline: the policy, bound to the model.
        view: the layer.
        total_pages: pages that the layer keeps over all heads; at most what it has.

    Returns:
        Page counts and kept entries, in position order within each head.
    """
    if pipeline.needs.accumulated:
        view = _observed(view, counted=pipeline.needs.observed)
    scores = pipeline.scorer.score(view)
    floor = _protected_pages(pipeline, view, total_pages)
    page_counts = pipeline.allocator.head_pages(view, scores, total_pages, floor)
    kept = page_counts * view.block_size
    mask = pipeline.selector.select(view, scores, kept, pipeline.protection)
    indices = _flat_indices(mask, total_pages * view.block_size)
    merged = Merged() if pipeline.merger is None else pipeline.merger.merge(view, scores, mask)
    unchanged = {name: getattr(view, name) for name in _REMEMBERED if getattr(merged, name) is None}
    return Selection(page_counts, indices, replace(merged, **unchanged))


def _observed(view: LayerView, counted: bool) -> LayerView:
    """The view with this event's queries' attention added to what was accumulated before.

    What the tail's tokens receive is not remembered: they become entries at a later event.

    Args:
        view: the layer.
        counted: also counts the queries; each sees what is not behind it.
    """
    mass, num_queries = observed_mass(view), view.queries.shape[0]
    mass *= num_queries
    if view.accumulated is not None:
        mass += view.accumulated
    if not counted:
        return replace(view, accumulated=mass)
    nth = torch.arange(view.num_entries, device=view.device)
    since = (view.lengths + view.num_tail)[:, None] - nth
    seen_by = since.clamp(0, num_queries).float()
    if view.observed is not None:
        seen_by += view.observed
    return replace(view, accumulated=mass, observed=seen_by)


def _protected_pages(pipeline: Pipeline, view: LayerView, total_pages: int) -> int:
    """Pages that the protected entries of a head need, at least 1 and at most an equal share."""
    protection = pipeline.protection
    recent = max(0, protection.num_recent - view.num_tail)
    pages = math.ceil((protection.num_sinks + recent) / view.block_size)
    return min(max(1, pages), total_pages // view.num_heads)


def _flat_indices(mask: Tensor, num_kept: int) -> Tensor:
    """[H, n] bool with `num_kept` set -> [num_kept] int64 places within the heads."""
    flat = torch.nonzero_static(mask.flatten(), size=num_kept)[:, 0]
    return flat % mask.shape[1]
