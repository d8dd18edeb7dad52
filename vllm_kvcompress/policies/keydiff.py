"""KeyDiff (arXiv 2504.15364): keys unlike the others."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.kernels.keydiff import keydiff_scores
from vllm_kvcompress.policies import LayerView, Policy, Stages, parameter


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Minus the cosine to an anchor of all keys: unusual keys are kept."""

    name = "keydiff"
    paper = "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364"
    summary = "Keys unlike the average key; needs no queries."
    stages = Stages(score="minus the cosine to the anchor", select="highest score")

    anchor: str = parameter(
        "mean_normalized",
        "what keys are compared with",
        choices=("mean_normalized", "mean_raw", "median", "pairwise"),
    )

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 in [-1, 1] (times the number of tokens for pairwise)."""
        return keydiff_scores(view.kv, self.anchor)
