"""KVSlimmer: Theoretical Insights and Practical Optimizations for Asymmetric KV Merging,
arXiv 2603.00907."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.pairs import Pairs
from vllm_kvcompress.policies import parameter
from vllm_kvcompress.policies.merging.asymkv import AsymKV


@dataclass(frozen=True)
class KVSlimmer(AsymKV):
    """AsymKV with keys weighted by the diagonal and mixed terms of the Hessian.

    With r = v - o: w_i in proportion to |c_ii| - |c_12| (Eq. 33), where
    c_ii = alpha_i (1 - 2 alpha_i) r_i and c_12 = -alpha_1 alpha_2 (r_1 + r_2), clipped to be
    positive. Where an alpha, or the pair's, reaches one half, or where the sum is close to 0:
    alpha_i |r_i|; where that is 0, the tokens.

    The variant `code`: L1 norms, and |c_12| bounded by alpha_1 alpha_2 (|r_1| + |r_2|). With
    `running` |c_ii| is added up over events, and sum w_i^2 |c_ii| is kept for a merged entry (the
    authors' code).
    """

    name = "kvslimmer"
    batches = True

    variant: str = parameter(
        "paper", "Eq. 33, or what the authors' code computes", choices=("paper", "code")
    )

    @property
    def order(self) -> int:
        return 2 if self.variant == "paper" else 1

    def sizes(self, shares: Tensor, norms: Tensor) -> Tensor:
        """|c_ii|, negative where alpha exceeds one half."""
        return shares * (1 - 2 * shares) * norms

    def weigh_pairs(self, pairs: Pairs) -> Tensor:
        """[2, P] by Eq. 33, where it is defined."""
        shares, norms = pairs.shares, pairs.norms
        both = norms[2] if self.variant == "paper" else norms[:2].sum(dim=0)
        weights = pairs.sizes - shares.prod(dim=0) * both
        total, largest = weights.sum(dim=0), pairs.sizes.abs().amax(dim=0)
        unsafe = (shares >= 0.5).any(dim=0) | (shares.sum(dim=0) >= 0.5)
        unsafe |= (total <= 1e-6 * largest) | ~torch.isfinite(total)
        return torch.where(unsafe, shares * norms[:2], weights.clamp_min(0))

    def carry(self, pairs: Pairs, weights: Tensor) -> Tensor:
        return (weights**2 * pairs.sizes).sum(dim=0)
