"""KVMerger (arXiv 2407.08454): neighbours of similar keys become one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.merging.neighbours import key_distances, neighbour_cosines
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import LayerView, Needs, Protection, Stages, parameter
from vllm_kvcompress.policies.merging.groups import (
    MERGE_SPACE,
    GroupMerging,
    GroupSums,
    links_needed,
)
from vllm_kvcompress.policies.parts.allocation import divide
from vllm_kvcompress.policies.parts.draws import uniform_draws
from vllm_kvcompress.policies.parts.mass import accumulated_mass, stride_of_sums


@dataclass(frozen=True)
class KVMerger(GroupMerging):
    """Links neighbours of the most similar keys, but neither recent nor heavy tokens.

    Keys and values are weighed by the distance to the key of the group's highest mass:
    g = exp(-(distance / mean distance of the group)^2), times the tokens of each entry. A fixed
    sigma makes it g = exp(-distance^2 / (2 sigma^2)); the paper's best is 5, and its formula for
    sigma, which contains g, has no other solution than the pivot alone.

    No group exceeds max_set: of every half of that many entries the weakest link is never made.
    Protected shares are the paper's at 50% kept; at 35% its are 0.23 and 0.06.
    """

    name = "kvmerger"
    batches = True
    paper = (
        "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks, "
        "arXiv 2407.08454"
    )
    summary = "Neighbours of similar keys become one entry that stands for all of them."
    stages = Stages(
        score="attention accumulated over one in stride of the last window_size queries of every "
        "event",
        protect="recent tokens, and those of the highest score",
        allocate="the same for every layer and head, or heads by how little of them can be merged",
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
    threshold: float = parameter(0.75, "cosine from which on neighbours are similar", -1.0, 1.0)
    sizes: str = parameter(
        "uniform",
        "budgets of heads: the same, or by what merging similar neighbours would leave (Fig. 3b)",
        choices=("uniform", "heads"),
    )
    max_set: int = parameter(64, "tokens that may become one, at most", minimum=1)
    sigma: float = parameter(0.0, "width of the Gaussian; 0: each group's mean distance", 0.0)
    pivot: str = parameter(
        "mass", "which token a group is weighed around", choices=("mass", "random")
    )
    value_mode: str = parameter(
        "lossless",
        "mean of values and a bias for their number (lossless), without it (mean), or the mean "
        "times their number (paper)",
        choices=("lossless", "mean", "paper"),
    )
    merge_space: str = parameter("rotated", MERGE_SPACE, choices=("rotated", "unrotated"))
    stride: int = stride_of_sums()

    @property
    def needs(self) -> Needs:
        return replace(super().needs, accumulated=True, stride=self.stride)

    @property
    def protection(self) -> Protection:
        """Recent tokens; heavy ones have the highest scores."""
        return Protection(recent_fraction=self.recent_fraction)

    def score(self, view: LayerView) -> Tensor:
        return accumulated_mass(view, self.window_size)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        """[H] int64 pages of each head."""
        if self.sizes == "uniform":
            return super().head_pages(view, scores, total, floor)
        mean = view.for_heads(total * view.block_size // view.heads_per_request)
        cosines, able = self._linkable(view, scores, view.lengths.minimum(mean))
        num_similar = (able & (cosines > self.threshold)).sum(dim=1)
        return divide(view, (view.lengths - num_similar).float(), total, floor)

    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        cosines, able = self._linkable(view, mass, num_kept)
        if self.budget_mode == "threshold":
            able = able & (cosines > self.threshold)
        return top_entries(cosines, able, links_needed(view, num_kept, able))

    def _linkable(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> tuple[Tensor, Tensor]:
        """[H, n] cosines with the entry before, and [H, n] bool: may join it."""
        nth = torch.arange(mass.shape[1], device=mass.device)
        _, recent = self.protection.bounds(view, num_kept)
        open_entries = view.valid & (nth < (view.lengths - recent)[:, None])
        num_heavy = (num_kept * self.heavy_fraction).floor().to(torch.int64)
        num_heavy = torch.minimum(num_heavy, open_entries.sum(dim=1))
        open_entries = open_entries & ~top_entries(mass, open_entries, num_heavy)
        cosines = neighbour_cosines(view.kv)
        before = torch.nn.functional.pad(open_entries[:, :-1], (1, 0))
        able = open_entries & before & (cosines > -1.0)
        return cosines, able & ~weakest(cosines, able, (self.max_set + 1) // 2)

    def pivots(self, view: LayerView, mass: Tensor, groups: GroupSums) -> Tensor:
        return groups.highest(mass if self.pivot == "mass" else uniform_draws(view).float())

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        distance = key_distances(view.kv, self.pivots(view, mass, groups))
        if self.sigma:
            return torch.exp(-((distance / self.sigma) ** 2) / 2) * tokens
        count = groups.sum(torch.ones_like(mass))
        mean = groups.spread(groups.sum(distance) / count.clamp_min(1))
        near = torch.exp(-((distance / mean.clamp_min(1e-20)) ** 2))
        return torch.where(mean > 0, near, 1.0) * tokens


def weakest(cosines: Tensor, able: Tensor, size: int) -> Tensor:
    """[H, n] bool: one of every `size` entries, of the lowest cosine that would be able to link.

    An entry that is not able comes first, since the chain ends there already, and so does the end.
    From one of these to the next it is at most 2 * size - 1 entries.
    """
    num_entries = cosines.shape[1]
    padded = functional.pad(
        cosines.masked_fill(~able, -torch.inf), (0, -num_entries % size), value=-torch.inf
    )
    lowest = padded.unflatten(1, (-1, size)).argmin(dim=2, keepdim=True)
    found = torch.zeros_like(padded, dtype=torch.bool).unflatten(1, (-1, size))
    return found.scatter(2, lowest, True).flatten(1)[:, :num_entries]
