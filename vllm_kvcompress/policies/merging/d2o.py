"""D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
Models, arXiv 2406.13035."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.merged_entries import merge_into
from vllm_kvcompress.kernels.merging.nearest_keys import nearest_keys
from vllm_kvcompress.policies import (
    LayerView,
    Merged,
    Merger,
    ModelHeads,
    Needs,
    Protection,
    parameter,
)
from vllm_kvcompress.policies.h2o import H2O


@dataclass(frozen=True)
class D2O(H2O, Merger):
    """H2O, with evicted tokens merged into the kept token of the most similar key.

    That is a cosine of at least theta, which starts as the mean of the evicted entries' best
    cosines and at each further event moves half way to theirs. A kept entry becomes the mean of
    itself, with weight 1, and the merged ones, weighted by their cosines; keys and values alike.
    """

    name = "d2o"
    batches = True
    stages = H2O.stages._replace(
        protect="the first num_sinks tokens and recent_fraction of the budget",
        merge="keys and values of evicted tokens that are similar enough, by cosine",
    )

    num_sinks: int = parameter(4, "first tokens kept", minimum=0)
    skip_layers: int = parameter(2, "first layers, where nothing is merged", minimum=0)

    def bind(self, model: ModelHeads) -> Self:
        """Counts the skipped layers from this pipeline stage's first one."""
        return replace(self, skip_layers=max(0, self.skip_layers - model.first_layer))

    @property
    def needs(self) -> Needs:
        return replace(super().needs, values=True)

    @property
    def protection(self) -> Protection:
        return replace(super().protection, num_sinks=self.num_sinks)

    def state_size(self, head_size: int) -> int:
        return 1

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Merges similar entries into kept ones, and stores theta as state."""
        if view.layer < self.skip_layers:
            return Merged(state=torch.zeros(len(kept), 1, device=view.device))
        evicted = view.valid & ~kept
        best, target = nearest_keys(view.kv, kept)
        mean = best.sum(dim=1) / evicted.sum(dim=1).clamp_min(1)
        theta = mean if view.state is None else (view.state[:, 0] + mean) / 2
        weight = best.masked_fill(~evicted | (best < theta[:, None]), 0).clamp_min(0)
        keys, values = merge_into(view.kv, target, weight)
        return Merged(keys, values, theta[:, None])
