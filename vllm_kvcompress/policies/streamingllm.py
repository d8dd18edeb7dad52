"""Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.policies import LayerView, Policy, Protection, Stages, parameter


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first tokens and the most recent ones, at their true positions."""

    name = "streamingllm"
    batches = True
    stages = Stages(score="position", protect="the first num_sinks tokens", select="most recent")

    num_sinks: int = parameter(4, "first tokens kept", minimum=0)

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.num_sinks)

    def score(self, view: LayerView) -> Tensor:
        return positions_as_scores(view)


def positions_as_scores(view: LayerView) -> Tensor:
    """[H, n] fp32 index of each entry (exact below 2**24 tokens)."""
    index = torch.arange(view.num_entries, device=view.device, dtype=torch.float32)
    return index.expand(view.num_heads, -1)
