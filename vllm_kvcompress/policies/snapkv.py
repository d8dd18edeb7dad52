"""SnapKV (arXiv 2404.14469): what the last queries attend to."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.parts.mass import (
    check_kernel_size,
    observed_mass,
    pool_left_of_window,
)


@dataclass(frozen=True)
class SnapKV(Policy):
    """Mean attention of an observation window, pooled so that neighbours stay together.

    The mean is over the window's queries and a KV head's group, before pooling.
    """

    name = "snapkv"
    batches = True
    paper = "SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469"
    summary = "What the last queries attend to."
    stages = Stages(
        score="mean attention of the last window_size queries, pooled over neighbouring tokens",
        protect="the last window_size tokens",
        allocate="the same for every layer and head",
        select="highest score",
    )

    window_size: int = parameter(32, "last queries observed, and kept", minimum=1)
    kernel_size: int = parameter(7, "width of the pooling over neighbours; odd", minimum=1)
    pooling: str = parameter("max", "how neighbours are pooled", choices=("max", "mean"))

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        return Protection(num_recent=self.window_size)

    def score(self, view: LayerView) -> Tensor:
        return pool_left_of_window(view, observed_mass(view), self.kernel_size, self.pooling)
