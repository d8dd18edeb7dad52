"""KVSlimmer: Theoretical Insights and Practical Optimizations for Asymmetric KV Merging,
arXiv 2603.00907."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.neighbours import value_residuals
from vllm_kvcompress.policies import LayerView, parameter
from vllm_kvcompress.policies.merging.asymkv import AsymKV, shares_of, unless_zero, with_former
from vllm_kvcompress.policies.merging.groups import GroupSums

MAX_EXACT = 4  # entries of the largest group that gets the paper's weights


@dataclass(frozen=True)
class KVSlimmer(AsymKV):
    """AsymKV with keys weighted by the diagonal and mixed terms of the Hessian.

    With r = v - o: w_i in proportion to |c_ii| - sum over j of |c_ij|, where
    c_ii = alpha_i (1 - 2 alpha_i) r_i and c_ij = -alpha_i alpha_j (r_i + r_j), clipped to be
    positive. Where an alpha, or the group's, reaches one half, where the sum is close to 0, and in
    groups of more than MAX_EXACT: alpha_i |r_i|; where that is 0, the tokens.

    The variant `code`: L1 norms, and |c_ij| bounded by alpha_i alpha_j (|r_i| + |r_j|). With
    `running` |c_ii| is added up over events, and sum w_i^2 |c_ii| is kept for a merged entry (the
    authors' code).
    """

    name = "kvslimmer"
    batches = True

    variant: str = parameter(
        "paper", "Eq. 33, or what the authors' code computes", choices=("paper", "code")
    )

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        alpha = shares_of(mass, groups)
        exact = self.variant == "paper"
        order, num_pairs = (2, MAX_EXACT - 1) if exact else (1, 0)
        size, *pairs = value_residuals(view.kv, alpha, order, num_pairs)
        own = with_former(view, alpha * (1 - 2 * alpha) * size)
        weight = own - self._cross(alpha, size, pairs, groups)
        total, most = groups.sum(weight), groups.sum(own.abs())
        count = groups.sum(torch.ones_like(alpha))
        heavy = groups.sum((alpha >= 0.5).float()) + (groups.sum(alpha) >= 0.5).float()
        unsafe = (heavy > 0) | (total <= 1e-6 * most) | (count > MAX_EXACT)
        unsafe = unsafe | ~torch.isfinite(total)
        simple = with_former(view, alpha * size)
        clipped = torch.where(groups.spread(unsafe), simple, weight.clamp_min(0))
        return unless_zero(groups, clipped, tokens)

    def add_up(
        self, view: LayerView, mass: Tensor, groups: GroupSums, weight: Tensor
    ) -> Tensor | None:
        alpha = shares_of(mass, groups)
        (size,) = value_residuals(view.kv, alpha, 2 if self.variant == "paper" else 1)
        own = with_former(view, alpha * (1 - 2 * alpha) * size)
        share = weight / groups.spread(groups.sum(weight)).clamp_min(1e-30)
        return groups.sum(share**2 * own)

    def _cross(self, alpha: Tensor, size: Tensor, pairs: list[Tensor], groups: GroupSums) -> Tensor:
        """[H, n] sum of |c_ij| over the other entries of the group."""
        if self.variant == "code":
            others = groups.spread(groups.sum(alpha)) - alpha
            other_sizes = groups.spread(groups.sum(alpha * size)) - alpha * size
            return alpha * (size * others + other_sizes)
        result = torch.zeros_like(alpha)
        for apart, pair in enumerate(pairs[: alpha.shape[1] - 1], start=1):
            same = groups.first[:, apart:] == groups.first[:, :-apart]
            both = alpha[:, apart:] * alpha[:, :-apart] * pair[:, :-apart]
            both = both.masked_fill(~same, 0)
            result[:, apart:] += both
            result[:, :-apart] += both
        return result
