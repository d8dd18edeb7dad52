"""KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364."""

from dataclasses import dataclass, replace

from torch import Tensor

from vllm_kvcompress.kernels.keydiff import keydiff_scores
from vllm_kvcompress.policies import Modifier, Pipeline, Policy, Stages, parameter
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.parts.selection import Protection


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keeps keys unlike the average key; needs no queries.

    The anchor is the mean of normalised keys, as in the paper's appendix G; its section 3.2 has
    that of raw keys (`mean_raw`).
    """

    name = "keydiff"
    batches = True
    any_order = True
    stages = Stages(score="minus the cosine to the anchor", select="highest score")

    anchor: str = parameter(
        "mean_normalized",
        "what keys are compared with",
        choices=("mean_normalized", "mean_raw"),
    )

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 in [-1, 1]."""
        return keydiff_scores(view.kv, self.anchor)


@dataclass(frozen=True)
class Window(Modifier):
    """Keeps a share of the budget for the most recent tokens."""

    name = "window"
    stages = Stages(protect="the most recent recent_fraction of the budget")
    goes_on = ("keydiff", "knorm", "tova")
    otherwise = "{} already says which recent tokens it keeps"

    recent_fraction: float = parameter(0.1, "part of the budget for recent tokens", 0.0, 1.0)

    def modify(self, base: Pipeline) -> Pipeline:
        return replace(base, protection=Protection(recent_fraction=self.recent_fraction))
