"""A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vllm_kvcompress.policies import LayerView, ModelHeads, Policy, Stages, parameter
from vllm_kvcompress.policies.parts.allocation import spread


@dataclass(frozen=True)
class KNorm(Policy):
    """Keeps keys of low Euclidean norm.

    The first layers keep everything at the expense of the others, as long as these keep at least
    half of a uniform budget.
    """

    name = "knorm"
    batches = True
    any_order = True
    stages = Stages(
        score="minus the key's norm",
        allocate="everything in the first skip_layers layers if the others keep half a uniform "
        "budget, else uniform",
        select="highest score",
    )

    skip_layers: int = parameter(2, "first layers that keep everything where possible", minimum=0)

    def bind(self, model: ModelHeads) -> Self:
        """Counts the skipped layers from this pipeline stage's first one."""
        return replace(self, skip_layers=max(0, self.skip_layers - model.first_layer))

    def score(self, view: LayerView) -> Tensor:
        """[H, n] scores in fp32, since most norms tie in 16 bits."""
        return -torch.linalg.vector_norm(view.kv.keys(), dim=2, dtype=torch.float32)

    @property
    def layer_dependent(self) -> bool:
        return self.skip_layers > 0

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        uniform, num_layers = num_blocks * num_heads, len(capacity)
        skipped = min(self.skip_layers, num_layers - 1)
        total = uniform * num_layers
        while (total - sum(capacity[:skipped])) * 2 < uniform * (num_layers - skipped):
            skipped -= 1
        floor = [*capacity[:skipped], *([0] * (num_layers - skipped))]
        return spread([1.0] * num_layers, total, capacity, floor)
