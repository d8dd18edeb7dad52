"""SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.parts import mass


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keeps what the last queries attend to, with its neighbours.

    The mean is over the window's queries and a KV head's group, before pooling.
    """

    name = "snapkv"
    batches = True
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
        mass.check_kernel_size(self.kernel_size)

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.window_size, min_window=mass.ENOUGH_QUERIES)

    @property
    def protection(self) -> Protection:
        return Protection(num_recent=self.window_size)

    def score(self, view: LayerView) -> Tensor:
        raw = mass.observed_mass(view)
        return mass.pool_left_of_window(view, raw, self.kernel_size, self.pooling)
