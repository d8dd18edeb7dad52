"""Decides what every head of a layer keeps, and how the rest is merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies.base import LayerView, Merged, Selection
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.parts.selection import NOTHING_PROTECTED, best_of_spans
from vllm_kvcompress.policies.pipeline import Pipeline

# Per-entry state that later events read; mergers may replace it.
_REMEMBERED = ("accumulated", "positions")


@dataclass(frozen=True)
class Totals:
    """Pages that requests keep in a layer, summed over its heads.

    Attributes:
        num_pages: pages of all requests.
        pages: [R] int64 pages of each request, at most what the layer holds.
        floors: [R] int64 minimum pages of a head: what protected entries need, and at most an
            equal share.
    """

    num_pages: int
    pages: Tensor
    floors: Tensor

    @classmethod
    def of(cls, pipeline: Pipeline, view: LayerView, pages: Sequence[int]) -> Totals:
        """Builds the totals of a view whose R requests keep `pages`."""
        protected = protected_pages(pipeline, view.num_tail, view.block_size)
        floors = [min(protected, total // view.heads_per_request) for total in pages]
        return cls(sum(pages), upload(list(pages), view.device), upload(floors, view.device))


def compress_layer(pipeline: Pipeline, view: LayerView, total_pages: int) -> Selection:
    """Calls `compress_batch` for one request that keeps `total_pages` over all heads."""
    return compress_batch(pipeline, view, Totals.of(pipeline, view, [total_pages]))


def compress_batch(pipeline: Pipeline, view: LayerView, totals: Totals) -> Selection:
    """Decides what every head of a layer keeps.

    Kept entries are in position order, behind those that the request protects as a whole.
    """
    if pipeline.needs.accumulated:
        view = _observed(view, pipeline.needs.stride)
    scores = pipeline.scorer.score(view)
    page_counts = pipeline.allocator.head_pages(view, scores, totals.pages, totals.floors)
    kept = page_counts * view.block_size
    if view.shared_spans is None:
        mask = pipeline.selector.select(view, scores, kept, pipeline.protection)
    else:
        certain = best_of_spans(view, scores, kept, pipeline.protection, pipeline.span_share)
        certain_view = replace(view, protected=certain)
        mask = pipeline.selector.select(certain_view, scores, kept, NOTHING_PROTECTED)
    indices = _flat_indices(mask, totals.num_pages * view.block_size, view.protected)
    merged = Merged() if pipeline.merger is None else pipeline.merger.merge(view, scores, mask)
    changed = {name for name in _REMEMBERED if getattr(merged, name) is not None}
    unchanged = {name: getattr(view.entries, name) for name in {*_REMEMBERED} - changed}
    return Selection(page_counts, indices, replace(merged, **unchanged))


def _observed(view: LayerView, stride: int) -> LayerView:
    """Returns the view with the attention of this event's queries added to the accumulated sums.

    Attention to tokens of the tail is left out: they become entries at a later event. Every
    stride-th query is evaluated and stands for the ones between.
    """
    mass, former = observed_mass(view, stride), view.entries
    mass *= view.queries.shape[0]
    if former.accumulated is not None:
        mass += former.accumulated
    return replace(view, entries=replace(former, accumulated=mass))


def protected_pages(
    pipeline: Pipeline, num_tail: int, block_size: int, num_protected: int = 0
) -> int:
    """Returns the pages that a head's protected entries need, at least 1.

    `num_protected` of them are protected by the request, the others by the policy.
    """
    protection = pipeline.protection
    recent = max(0, protection.num_recent - num_tail)
    pages = math.ceil((num_protected + protection.num_sinks + recent) / block_size)
    return max(1, pages)


def _flat_indices(mask: Tensor, num_kept: int, protected: Tensor | None) -> Tensor:
    """Returns the [num_kept] int64 places within the heads of the set bits of an [H, n] mask.

    Those of `protected` entries come first in each head, so that the next event finds them.
    """
    flat = torch.nonzero_static(mask.flatten(), size=num_kept)[:, 0]
    if protected is not None:
        heads, is_other = flat // mask.shape[1], ~protected.flatten()[flat]
        flat = flat[(2 * heads + is_other).argsort(stable=True)]
    return flat % mask.shape[1]
