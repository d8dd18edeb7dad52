"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.parts import mass


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps tokens of high accumulated attention, and recent ones.

    Each event observes every `stride`-th of its last `window_size` queries; the paper adds up all.
    """

    name = "h2o"
    batches = True
    any_order = True
    stages = Stages(
        score="attention accumulated over one in stride of the last window_size queries of every "
        "event",
        protect="the most recent recent_fraction of the budget",
        allocate="the same for every layer and head",
        select="highest score",
    )

    window_size: int = parameter(
        256, "last queries of an event whose attention is added up", minimum=1
    )
    recent_fraction: float = parameter(0.5, "part of the budget for recent tokens", 0.0, 1.0)
    stride: int = mass.STRIDE

    @property
    def needs(self) -> Needs:
        return Needs(self.window_size, accumulated=True, stride=self.stride)

    @property
    def protection(self) -> Protection:
        return Protection(recent_fraction=self.recent_fraction)

    def score(self, view: LayerView) -> Tensor:
        return mass.accumulated_mass(view, self.window_size)
