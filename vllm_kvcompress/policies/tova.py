"""Transformers are Multi-State RNNs, arXiv 2401.06104."""

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Policy, Stages
from vllm_kvcompress.policies.parts.mass import observed_mass


@dataclass(frozen=True)
class TOVA(Policy):
    """Keeps what the last query attends to, the same for all heads of a layer.

    All heads of a layer keep the same tokens. Under tensor parallelism the average is over the
    rank's heads, so ranks may keep different tokens.
    """

    name = "tova"
    batches = True
    stages = Stages(
        score="last query's attention, mean over the layer's heads", select="highest score"
    )

    @property
    def needs(self) -> Needs:
        return Needs(window_size=1)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32; every head has the same row."""
        of_layer = view.by_request(observed_mass(view))
        return of_layer.mean(dim=1, keepdim=True).expand_as(of_layer).flatten(0, 1)
