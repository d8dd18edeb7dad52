"""KVMerger (arXiv 2407.08454): neighbours of similar keys become one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.neighbours import key_distances, neighbour_cosines
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import LayerView, Needs, Protection, Stages, parameter
from vllm_kvcompress.policies.merging.groups import (
    MERGE_SPACE,
    GroupMerging,
    GroupSums,
    links_needed,
)
from vllm_kvcompress.policies.parts.mass import accumulated_mass


@dataclass(frozen=True)
class KVMerger(GroupMerging):
    """Links neighbours of the most similar keys, but neither recent nor heavy tokens.

    Keys and values are weighed by the distance to the key of the group's highest mass:
    g = exp(-(distance / mean distance of the group)^2), times the tokens of each entry.
    """

    name = "kvmerger"
    paper = (
        "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks, "
        "arXiv 2407.08454"
    )
    summary = "Neighbours of similar keys become one entry that stands for all of them."
    stages = Stages(
        score="attention accumulated over the last window_size queries of every event",
        protect="recent tokens, and those of the highest score",
        allocate="the same for every layer and head",
        select="links of the highest cosine between neighbouring keys",
        merge="a group's keys and values, weighted by closeness to its heaviest token",
    )
    values_like_keys = True
    merge_position = "pivot"

    window_size: int = parameter(
        256, "last queries of an event whose attention is added up", minimum=1
    )
    recent_fraction: float = parameter(0.34, "part of the budget for recent tokens", 0.0, 1.0)
    heavy_fraction: float = parameter(0.24, "part of the budget for heavy tokens", 0.0, 1.0)
    budget_mode: str = parameter(
        "topk_links",
        "merge the most similar neighbours until the budget is met, or only those above the "
        "threshold, and evict the rest",
        choices=("topk_links", "threshold"),
    )
    threshold: float = parameter(0.75, "least cosine in threshold mode", -1.0, 1.0)
    max_set: int = parameter(64, "tokens that may become one, at most", minimum=1)
    value_mode: str = parameter(
        "lossless",
        "mean of values and a bias for their number (lossless), without it (mean), or the mean "
        "times their number (paper)",
        choices=("lossless", "mean", "paper"),
    )
    merge_space: str = parameter("rotated", MERGE_SPACE, choices=("rotated", "unrotated"))

    @property
    def needs(self) -> Needs:
        return replace(super().needs, accumulated=True)

    @property
    def protection(self) -> Protection:
        """Recent tokens; heavy ones have the highest scores."""
        return Protection(recent_fraction=self.recent_fraction)

    def score(self, view: LayerView) -> Tensor:
        return accumulated_mass(view, self.window_size)

    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        nth = torch.arange(mass.shape[1], device=mass.device)
        _, recent = self.protection.bounds(view, num_kept)
        open_entries = view.valid & (nth < (view.lengths - recent)[:, None])
        num_heavy = (num_kept * self.heavy_fraction).floor().to(torch.int64)
        num_heavy = torch.minimum(num_heavy, open_entries.sum(dim=1))
        open_entries = open_entries & ~top_entries(mass, open_entries, num_heavy)
        cosines = neighbour_cosines(view.kv)
        before = torch.nn.functional.pad(open_entries[:, :-1], (1, 0))
        able = open_entries & before & (nth % self.max_set != 0)
        least = -1.0 if self.budget_mode == "topk_links" else self.threshold
        able = able & (cosines > least)
        return top_entries(cosines, able, links_needed(view, num_kept, able))

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        distance = key_distances(view.kv, groups.highest(mass))
        count = groups.sum(torch.ones_like(mass))
        mean = groups.spread(groups.sum(distance) / count.clamp_min(1))
        near = torch.exp(-((distance / mean.clamp_min(1e-20)) ** 2))
        return torch.where(mean > 0, near, 1.0) * tokens
