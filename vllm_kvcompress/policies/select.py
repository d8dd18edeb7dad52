"""Which entries a head keeps, once it is known how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from vllm_kvcompress.kernels.selection import top_entries
from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.measures import value_norms_l1, value_norms_l2
from vllm_kvcompress.policies.protect import Protection


class Selector(Protocol):
    """Keeps `kept[h]` entries of each head, the protected ones among them."""

    @property
    def needs(self) -> Needs:
        """What the engine has to hand over."""
        ...

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h."""
        ...


@dataclass(frozen=True)
class TopScores:
    """Protected entries first, then the best by score."""

    needs: ClassVar[Needs] = Needs()

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool."""
        valid = view.valid
        first = scores.masked_fill(protection.mask(view, kept), float("inf"))
        return top_entries(first, valid, kept)


@dataclass(frozen=True)
class TwoStage:
    """CriticalKV (arXiv 2502.03805, Algorithm 1): value-aware selection inside each head.

    A share alpha of the head's budget goes to the entries of highest mass S; the rest to those
    of highest (S + epsilon) * nu, where nu is the norm of the value projected through W_O.
    Budgets exclude protected entries.

    Attributes:
        alpha: share of the first stage.
        epsilon: added to the mass (a mean over the window, so absolute).
        norm: l1 (exact, needs W_O) or l2 (from the Gram matrix of W_O).
    """

    alpha: float = 0.5
    epsilon: float = 1e-4
    norm: str = "l1"

    @property
    def needs(self) -> Needs:
        """W_O, or its Gram matrix."""
        return Needs(output_weight=self.norm == "l1", output_gram=self.norm == "l2")

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool."""
        valid = view.valid
        protected = protection.mask(view, kept)
        num_protected = protected.sum(dim=1)
        budget = (kept - num_protected).clamp_min(0)
        first_stage = num_protected + (budget * self.alpha).floor().to(torch.int64)
        sure = scores.masked_fill(protected, float("inf"))
        chosen = top_entries(sure, valid, torch.minimum(first_stage, kept))
        weighted = (scores + self.epsilon) * self._value_norms(view, valid & ~chosen)
        return top_entries(weighted.masked_fill(chosen, float("inf")), valid, kept)

    def _value_norms(self, view: LayerView, open_entries: Tensor) -> Tensor:
        return value_norms_l1(view, open_entries) if self.norm == "l1" else value_norms_l2(view)
