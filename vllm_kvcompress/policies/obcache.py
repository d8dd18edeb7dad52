"""OBCache (arXiv 2510.07651): pruning by what attention outputs would lose."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.measures import perturbations
from vllm_kvcompress.policies.parts.mass import pool_left_of_window
from vllm_kvcompress.policies.parts.parameters import parameter
from vllm_kvcompress.policies.pipeline import Pipeline
from vllm_kvcompress.policies.policy import Modifier, Stages


@dataclass(frozen=True)
class Perturbation:
    """How much the window's attention outputs would change without a token.

    Attributes:
        window_size: queries observed.
        kernel_size: width of the pooling over neighbouring tokens; 1: none.
        pooling: max or mean.
        variant: joint, value or key; what is pruned of the token.
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


@dataclass(frozen=True)
class OBCache(Modifier):
    """`Perturbation` in the place of attention mass, with the window and pooling of the base."""

    name = "obcache"
    paper = (
        "OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference, "
        "arXiv 2510.07651"
    )
    summary = "Entries without which the observed queries' attention outputs would change most."
    stages = Stages(
        score="squared change of the window's attention outputs, instead of their attention"
    )
    goes_on = ("snapkv", "h2o")
    otherwise = "obcache takes the place of the scores of snapkv or h2o, which {} is not"

    variant: str = parameter(
        "joint",
        "what is pruned of an entry: its value, its key, or both",
        choices=("joint", "value", "key"),
    )

    def modify(self, base: Pipeline) -> Pipeline:
        """With another scorer."""
        window, kernel = base.params["window_size"], base.params.get("kernel_size", 1)
        pooling = base.params.get("pooling", "max")
        return replace(base, scorer=Perturbation(window, kernel, pooling, self.variant))
