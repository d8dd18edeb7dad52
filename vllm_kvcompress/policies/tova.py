"""TOVA (arXiv 2401.06104): what the last query attends to."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Policy, Stages
from vllm_kvcompress.policies.parts.mass import observed_mass


@dataclass(frozen=True)
class TOVA(Policy):
    """Attention of the last query, averaged over all query heads of the layer.

    All heads of a layer keep the same tokens. Under tensor parallelism the average is over the
    rank's own heads, so ranks may keep different tokens.
    """

    name = "tova"
    paper = "Transformers are Multi-State RNNs, arXiv 2401.06104"
    summary = "What the last query attends to, the same for all heads of a layer."
    stages = Stages(
        score="last query's attention, mean over the layer's heads", select="highest score"
    )

    @property
    def needs(self) -> Needs:
        return Needs(window_size=1)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32, the same row for every head."""
        mass = observed_mass(view)
        return mass.mean(dim=0, keepdim=True).expand_as(mass)
