"""Tokens that are kept whatever their score: the first tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView


@dataclass(frozen=True)
class Protection:
    """How many tokens at either end stay.

    Attributes:
        num_sinks: tokens at the beginning.
        num_recent: tokens at the end.
        recent_fraction: instead, a fraction of what the head keeps.
    """

    num_sinks: int = 0
    num_recent: int = 0
    recent_fraction: float = 0.0

    def bounds(self, view: LayerView, kept: Tensor) -> tuple[Tensor, Tensor]:
        """[H] protected sinks and recent tokens among the full blocks.

        The partial last block is recent and kept anyway. When sinks and recent tokens exceed
        what a head keeps, first the recent ones shrink, then the sinks (methods: small budgets).

        Args:
            view: the layer.
            kept: [H] int64 tokens of the full blocks that each head is to keep.
        """
        tails, room = view.kv.tails, kept - self.num_sinks
        recent = (self.num_recent - tails).clamp_min(0)
        if self.recent_fraction:
            share = ((kept + tails).double() * self.recent_fraction).floor().to(torch.int64)
            recent = (share - tails).clamp_min(0)
        if self.num_recent or self.recent_fraction:
            room = torch.maximum(room, 1 - tails)  # without a tail there is a recent token yet
        recent = room.clamp_min(0).minimum(recent).minimum(kept)
        sinks = (kept - recent).clamp_max(self.num_sinks)
        return sinks, recent

    def mask(self, view: LayerView, kept: Tensor) -> Tensor:
        """[H, n] bool: the protected tokens."""
        sinks, recent = self.bounds(view, kept)
        nth = torch.arange(view.num_entries, device=kept.device)
        first = nth < sinks[:, None]
        last = nth >= (view.lengths - recent)[:, None]
        return (first | last) & view.valid


NOTHING_PROTECTED = Protection()
