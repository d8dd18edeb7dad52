"""Attention, of this project; from SnapKV, arXiv 2404.14469, and StreamingLLM, arXiv 2309.17453."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.parts import mass


@dataclass(frozen=True)
class Attention(Policy):
    """Keeps what the last queries attend to, the first tokens and the last.

    SnapKV's mean attention without its pooling, and with fewer of the last tokens: where `+headkv`
    leaves a head two pages, SnapKV's window would take the place of the first tokens, which loses
    seven times as much text (docs/results/spans.md).
    """

    name = "attention"
    batches = True
    stages = Stages(
        score="mean attention of the last window_size queries",
        protect="the first num_sinks tokens, and the last num_recent",
        allocate="the same for every layer and head",
        select="highest score",
    )

    window_size: int = parameter(32, "last queries observed", minimum=1)
    num_recent: int = parameter(16, "last tokens that are kept", minimum=0)
    num_sinks: int = parameter(4, "first tokens that are kept", minimum=0)

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.window_size, min_window=mass.ENOUGH_QUERIES)

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.num_sinks, num_recent=self.num_recent)

    def score(self, view: LayerView) -> Tensor:
        return mass.observed_mass(view)
