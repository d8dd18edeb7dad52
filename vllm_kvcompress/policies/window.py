"""Scores from the attention of the last queries.

SnapKV (arXiv 2404.14469), H2O (arXiv 2306.14048) with a stated number of queries observed at every
event, TOVA (arXiv 2401.06104), OBCache (arXiv 2510.07651).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels import max_or_mean_pool
from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.measures import observed_mass, perturbations


@dataclass(frozen=True)
class WindowMass:
    """Mean attention mass that a window of last queries puts on each entry, then pooled.

    Attributes:
        window_size: queries observed.
        kernel_size: width of the pooling over neighbouring tokens; 1: none.
        pooling: max or mean.
    """

    window_size: int = 32
    kernel_size: int = 7
    pooling: str = "max"

    @property
    def needs(self) -> Needs:
        """The last queries."""
        return Needs(window_size=self.window_size)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 pooled mass; the group is averaged before pooling."""
        mass = observed_mass(view)
        return pool_left_of_window(view, mass, self.kernel_size, self.pooling)


@dataclass(frozen=True)
class AccumulatedMass:
    """Attention that an entry has received from the observed queries of all events so far (H2O).

    Of each event the last `window_size` queries since the former one are observed. The sum is
    counted in whole windows, so that at a first event it is the window's mean.

    Attributes:
        window_size: queries observed at an event, at most.
    """

    window_size: int = 256

    @property
    def needs(self) -> Needs:
        """The last queries, and what earlier ones have added."""
        return Needs(window_size=self.window_size, accumulated=True)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32."""
        assert view.accumulated is not None
        return view.accumulated / self.window_size


@dataclass(frozen=True)
class Perturbation:
    """OBCache: how much the window's attention outputs would change without an entry.

    Attributes:
        window_size: queries observed.
        kernel_size: width of the pooling over neighbouring tokens; 1: none.
        pooling: max or mean.
        variant: joint, value or key; what is pruned of the entry.
    """

    window_size: int = 32
    kernel_size: int = 7
    pooling: str = "max"
    variant: str = "joint"

    @property
    def needs(self) -> Needs:
        """The last queries, and values."""
        return Needs(window_size=self.window_size, values=True, plain_logits=True)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 pooled perturbations; the group is summed before pooling."""
        raw = perturbations(view, self.variant)
        return pool_left_of_window(view, raw, self.kernel_size, self.pooling)


def pool_left_of_window(view: LayerView, raw: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """[H, n] scores pooled over neighbours, over the columns left of the window.

    The window's own scores stay, and do not leak into their neighbours.
    """
    if kernel_size <= 1:
        return raw
    num_window = max(0, view.queries.shape[0] - view.num_tail)
    in_window = _num_following(view) < num_window
    empty = float("-inf") if pooling == "max" else 0.0
    pooled = max_or_mean_pool(raw.masked_fill(in_window, empty), kernel_size, pooling)
    return torch.where(in_window, raw, pooled)


def _num_following(view: LayerView) -> Tensor:
    """[H, n] how many valid entries follow; negative for padding."""
    nth = torch.arange(view.num_entries, device=view.device)
    return (view.lengths - 1)[:, None] - nth


@dataclass(frozen=True)
class LastQueryMass:
    """Attention of the last query, averaged over all query heads of the layer (TOVA).

    All heads of a layer keep the same entries. Under tensor parallelism the average is over the
    rank's own heads, so ranks may keep different entries.
    """

    @property
    def needs(self) -> Needs:
        """The last query."""
        return Needs(window_size=1)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32, the same row for every head."""
        mass = observed_mass(view)
        return mass.mean(dim=0, keepdim=True).expand_as(mass)
