"""OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference,
arXiv 2510.07651."""

from dataclasses import dataclass, replace

from torch import Tensor

from vllm_kvcompress.kernels.window_perturbation import window_perturbation
from vllm_kvcompress.policies import LayerView, Modifier, Needs, Pipeline, Stages, parameter
from vllm_kvcompress.policies.parts.mass import pool_left_of_window


@dataclass(frozen=True)
class OBCache(Modifier):
    """Keeps tokens without which the window's attention outputs would change most.

    The group is summed before pooling.

    Attributes:
        window_size, kernel_size, pooling, stride: those of the policy underneath.
    """

    name = "obcache"
    batches = True
    stages = Stages(
        score="squared change of the window's attention outputs, instead of their attention"
    )
    goes_on = ("snapkv", "h2o")
    otherwise = "obcache replaces the scores of snapkv or h2o, and {} is neither"

    variant: str = parameter(
        "joint",
        "what is pruned of a token: the value, the key, or both",
        choices=("joint", "value", "key"),
    )
    window_size: int = 32
    kernel_size: int = 1
    pooling: str = "max"
    stride: int = 1

    def modify(self, base: Pipeline) -> Pipeline:
        shared = {"window_size", "kernel_size", "pooling", "stride"} & set(base.params)
        return replace(base, scorer=replace(self, **{name: base.params[name] for name in shared}))

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.window_size, values=True, plain_logits=True)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 pooled perturbations."""
        raw = window_perturbation(view.kv, view.queries, view.scale, self.variant, self.stride)
        return pool_left_of_window(view, raw, self.kernel_size, self.pooling)
