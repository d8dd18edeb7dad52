"""KeyDiff (arXiv 2504.15364): keys unlike the others."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.keydiff import keydiff_scores
from vllm_kvcompress.policies import LayerView, Policy, Stages, parameter


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Minus the cosine to an anchor of all keys: unusual keys are kept.

    The paper's ablation compares by products and distances, too, and finds both worse.
    """

    name = "keydiff"
    batches = True
    paper = "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364"
    summary = "Keys unlike the average key; needs no queries."
    stages = Stages(score="minus the cosine to the anchor", select="highest score")

    anchor: str = parameter(
        "mean_normalized",
        "what keys are compared with",
        choices=("mean_normalized", "mean_raw", "median", "pairwise"),
    )

    metric: str = parameter(
        "cosine", "how they are compared", choices=("cosine", "dot", "euclidean")
    )

    def __post_init__(self) -> None:
        if self.anchor == "pairwise" and self.metric != "cosine":
            raise ConfigError(
                f"metric: expected cosine with anchor=pairwise, which adds up cosines, found "
                f"{self.metric}; choose another anchor."
            )

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32; for cosines in [-1, 1] (times the number of tokens for pairwise)."""
        return keydiff_scores(view.kv, self.anchor, self.metric)
