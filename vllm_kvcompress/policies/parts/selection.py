"""Which tokens a head keeps: protected ones at both ends, then those of the highest scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies.base import LayerView, Needs


@dataclass(frozen=True)
class Protection:
    """How many tokens at either end are kept whatever their score.

    Attributes:
        num_sinks: tokens at the beginning.
        num_recent: tokens at the end.
        recent_fraction: fraction of what the head keeps, if that is more than `num_recent`.
    """

    num_sinks: int = 0
    num_recent: int = 0
    recent_fraction: float = 0.0

    def bounds(self, view: LayerView, kept: Tensor) -> tuple[Tensor, Tensor]:
        """[H] protected sinks and [H] recent tokens among the `kept` [H] of the full blocks.

        Tokens that the request protects come before both. The partial last block counts as recent
        and is kept anyway. Where sinks and recent tokens exceed what a head keeps, recent ones are
        cut first, then sinks (methods: small budgets).
        """
        if view.protected is not None:
            kept = (kept - view.protected.sum(dim=1)).clamp_min(0)
        tails, room = view.kv.tails, kept - self.num_sinks
        recent = (self.num_recent - tails).clamp_min(0)
        if self.recent_fraction:
            share = ((kept + tails).double() * self.recent_fraction).floor().to(torch.int64)
            recent = recent.maximum(share - tails)
        if self.num_recent or self.recent_fraction:
            room = torch.maximum(room, 1 - tails)  # without a tail at least one token is recent
        recent = room.clamp_min(0).minimum(recent).minimum(kept)
        sinks = (kept - recent).clamp_max(self.num_sinks)
        return sinks, recent

    def mask(self, view: LayerView, kept: Tensor) -> Tensor:
        """[H, n] bool, true for protected tokens."""
        sinks, recent = self.bounds(view, kept)
        index = torch.arange(view.num_entries, device=kept.device)
        if view.protected is None:
            first = index < sinks[:, None]
        else:  # sinks are the first of the others
            first = view.protected | ((~view.protected).cumsum(dim=1) <= sinks[:, None])
        last = index >= (view.lengths - recent)[:, None]
        return (first | last) & view.valid


NOTHING_PROTECTED = Protection()


class Selector:
    """Keeps protected tokens, then the best by score, unless a policy overrides it."""

    @property
    def needs(self) -> Needs:
        """What the selector reads besides keys."""
        return Needs()

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h, the protected ones among them."""
        first = scores.masked_fill(protection.mask(view, kept), float("inf"))
        return top_entries(first, view.valid, kept)


def best_of_spans(
    view: LayerView, scores: Tensor, kept: Tensor, protection: Protection, share: float | None
) -> Tensor:
    """[H, n] bool, true for protected tokens and for the best ones of each span of a request.

    Of a span of s tokens a head keeps at least ceil(share * s) of the highest score, besides those
    that the policy protects in the rest of its room. Without a share it is fair eviction
    (https://arxiv.org/abs/2510.00231): floor(s * (k - p) / n) where the request has read n tokens
    in full blocks, and the head keeps k, p of these protected by the policy. It is never more than
    the head still holds, or has room for.
    """
    assert view.shared_spans is not None
    bounds = view.shared_spans.repeat_interleave(view.heads_per_request, dim=0)
    sizes = bounds[..., 1] - bounds[..., 0]  # [H, 1 + spans]
    if share is None:
        certain = protection.mask(view, kept)
        wanted = sizes[:, 1:] * (kept - certain.sum(dim=1))[:, None] // sizes[:, :1]
    else:
        wanted = (sizes[:, 1:].double() * share - 1e-6).ceil().long().minimum(kept[:, None])
        certain = protection.mask(view, (kept - wanted.sum(dim=1)).clamp_min(0))
    positions = view.entries.positions
    if positions is None:
        positions = torch.arange(view.num_entries, device=view.device)[None]
    others = view.valid & ~certain
    for span in range(wanted.shape[1]):
        start, end = bounds[:, 1 + span, :, None].unbind(dim=1)
        inside = others & (positions >= start) & (positions < end)
        certain = certain | top_entries(scores, inside, wanted[:, span].minimum(inside.sum(dim=1)))
    return certain
