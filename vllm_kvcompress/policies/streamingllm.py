"""StreamingLLM (arXiv 2309.17453): the first tokens and the latest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.policies import LayerView, Policy, Protection, Stages, parameter


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Sinks, and the later the better."""

    name = "streamingllm"
    batches = True
    paper = "Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"
    summary = "The first tokens and the most recent ones; positions stay the true ones."
    stages = Stages(score="position", protect="the first num_sinks tokens", select="most recent")

    num_sinks: int = parameter(4, "first tokens kept", minimum=0)

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.num_sinks)

    def score(self, view: LayerView) -> Tensor:
        return places(view)


def places(view: LayerView) -> Tensor:
    """[H, n] fp32 place in the sequence (exact below 2**24 tokens)."""
    nth = torch.arange(view.num_entries, device=view.device, dtype=torch.float32)
    return nth.expand(view.num_heads, -1)
