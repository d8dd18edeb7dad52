"""How the keys of a merged group are weighed: KVMerger, AsymKV's proxy, KVSlimmer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.links import GroupSums
from vllm_kvcompress.policies.measures import key_distances, value_residuals

LARGEST_EXACT = 4  # entries of a group for which KVSlimmer's weights are computed


@dataclass(frozen=True)
class Gaussian:
    """KVMerger: by the distance to the key of the group's highest mass.

    g = exp(-(distance / mean distance of the group)^2), times the tokens of each entry.
    """

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        """[H, n] fp32."""
        distance = key_distances(view, groups.highest(mass))
        count = groups.sum(torch.ones_like(mass))
        mean = groups.spread(groups.sum(distance) / count.clamp_min(1))
        near = torch.exp(-((distance / mean.clamp_min(1e-20)) ** 2))
        return torch.where(mean > 0, near, 1.0) * tokens


@dataclass(frozen=True)
class AsymProxy:
    """AsymKV without gradients: h = alpha^2 |v - o|^2, with an isotropic upstream gradient."""

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        """[H, n] fp32; by tokens where a group's sum is 0."""
        alpha = _shares(mass, groups)
        weight = (alpha * value_residuals(view, alpha, order=2)[0]) ** 2
        return _unless_zero(groups, weight, tokens)


@dataclass(frozen=True)
class Slimmer:
    """KVSlimmer (arXiv 2603.00907, Eq. 33, and its form for groups).

    With r = v - o: w_i in proportion to |c_ii| - sum over j of |c_ij|, where
    c_ii = alpha_i (1 - 2 alpha_i) r_i and c_ij = -alpha_i alpha_j (r_i + r_j), clipped to be
    positive. Where an alpha, or the group's, reaches one half, where the sum is next to
    nothing, and in groups of more than LARGEST_EXACT: alpha_i |r_i|; where that is 0, the tokens.

    Attributes:
        variant: paper, or code: L1 norms, and |c_ij| bounded by alpha_i alpha_j (|r_i| + |r_j|).
    """

    variant: str = "paper"

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        """[H, n] fp32."""
        alpha = _shares(mass, groups)
        exact = self.variant == "paper"
        order, num_pairs = (2, LARGEST_EXACT - 1) if exact else (1, 0)
        size, *pairs = value_residuals(view, alpha, order, num_pairs)
        own = alpha * (1 - 2 * alpha) * size
        weight = own - self._cross(alpha, size, pairs, groups)
        total, most = groups.sum(weight), groups.sum(own.abs())
        count = groups.sum(torch.ones_like(alpha))
        heavy = groups.sum((alpha >= 0.5).float()) + (groups.sum(alpha) >= 0.5).float()
        unsafe = (heavy > 0) | (total <= 1e-6 * most) | (count > LARGEST_EXACT)
        unsafe = unsafe | ~torch.isfinite(total)
        simple = alpha * size
        clipped = torch.where(groups.spread(unsafe), simple, weight.clamp_min(0))
        return _unless_zero(groups, clipped, tokens)

    def _cross(self, alpha: Tensor, size: Tensor, pairs: list[Tensor], groups: GroupSums) -> Tensor:
        """[H, n] sum over the others of the group of |c_ij|."""
        if self.variant == "code":
            others = groups.spread(groups.sum(alpha)) - alpha
            theirs = groups.spread(groups.sum(alpha * size)) - alpha * size
            return alpha * (size * others + theirs)
        result = torch.zeros_like(alpha)
        for apart, pair in enumerate(pairs[: alpha.shape[1] - 1], start=1):
            same = groups.place[:, apart:] == groups.place[:, :-apart]
            both = alpha[:, apart:] * alpha[:, :-apart] * pair[:, :-apart]
            both = both.masked_fill(~same, 0)
            result[:, apart:] += both
            result[:, :-apart] += both
        return result


def _shares(mass: Tensor, groups: GroupSums) -> Tensor:
    """[H, n] mass normalised over the entries, 0 for padding."""
    clean = mass.masked_fill(~groups.valid, 0)
    return clean / clean.sum(dim=1, keepdim=True).clamp_min(1e-30)


def _unless_zero(groups: GroupSums, weight: Tensor, tokens: Tensor) -> Tensor:
    """The weights, by tokens in groups where they vanish or are not finite."""
    total = groups.sum(weight)
    usable = groups.spread((total > 0) & torch.isfinite(total))
    return torch.where(usable, weight, tokens).masked_fill(~groups.valid, 0)
