"""Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks,
arXiv 2407.08454."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvcompress.kernels.merging.neighbours import key_distances, neighbour_cosines
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import LayerView, Needs, Protection, Stages, parameter
from vllm_kvcompress.policies.merging import groups as grouping
from vllm_kvcompress.policies.merging.cam import uniform_draws
from vllm_kvcompress.policies.merging.groups import GroupMerging, Groups
from vllm_kvcompress.policies.parts.allocation import divide
from vllm_kvcompress.policies.parts.mass import STRIDE, accumulated_mass


@dataclass(frozen=True)
class KVMerger(GroupMerging):
    """Merges neighbours of similar keys into one entry that stands for all of them.

    Keys and values are weighted by the distance to the pivot, the key of the group's highest mass:
    g = exp(-(distance / mean distance of the group)^2), times the tokens of each entry. A fixed
    sigma makes it g = exp(-distance^2 / (2 sigma^2)); the paper's best is 5, and its formula for
    sigma, which contains g, has the pivot alone as its only solution.

    No group exceeds max_set, since the weakest link of every max_set / 2 entries is never made.
    Protected shares are the paper's at 50% kept; at 35% the paper has 0.23 and 0.06.
    """

    name = "kvmerger"
    batches = True
    stages = Stages(
        score="attention accumulated over every stride-th of the last window_size queries of "
        "every event",
        protect="recent tokens, and those of the highest score",
        allocate="the same for every layer and head, or more for heads that merge less",
        select="links of the highest cosine between neighbouring keys",
        merge="a group's keys and values, weighted by closeness to its token of the highest score",
    )
    values_like_keys = True
    merge_position = "pivot"

    window_size: int = parameter(
        256, "last queries of an event whose attention is added up", minimum=1
    )
    recent_fraction: float = parameter(0.34, "part of the budget for recent tokens", 0.0, 1.0)
    heavy_fraction: float = parameter(0.24, "part of the budget for tokens of high score", 0.0, 1.0)
    budget_mode: str = parameter(
        "topk_links",
        "merge the most similar neighbours until the budget is met, or only those above the "
        "threshold, and evict the rest",
        choices=("topk_links", "threshold"),
    )
    threshold: float = parameter(0.75, "cosine above which neighbours are similar", -1.0, 1.0)
    sizes: str = parameter(
        "uniform",
        "budgets of heads: the same, or by how many entries merging would leave (Fig. 3b)",
        choices=("uniform", "heads"),
    )
    max_set: int = parameter(64, "most tokens that become one", minimum=1)
    sigma: float = parameter(0.0, "width of the Gaussian; 0: each group's mean distance", 0.0)
    pivot: str = parameter(
        "mass", "token that a group is weighted around", choices=("mass", "random")
    )
    value_mode: str = parameter(
        "lossless",
        "mean of values and a bias for their number (lossless), without it (mean), or the mean "
        "times their number (paper)",
        choices=("lossless", "mean", "paper"),
    )
    merge_space: str = parameter("rotated", grouping.MERGE_SPACE, choices=("rotated", "unrotated"))
    stride: int = STRIDE

    @property
    def needs(self) -> Needs:
        return replace(super().needs, accumulated=True, stride=self.stride)

    @property
    def protection(self) -> Protection:
        """Recent tokens; those of high mass are selected by score."""
        return Protection(recent_fraction=self.recent_fraction)

    def score(self, view: LayerView) -> Tensor:
        return accumulated_mass(view, self.window_size)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
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
        number = torch.minimum((view.lengths - num_kept).clamp_min(0), able.sum(dim=1))
        return top_entries(cosines, able, number)

    def _linkable(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> tuple[Tensor, Tensor]:
        """[H, n] cosines with the entry before, and [H, n] bool, true where it may be joined."""
        index = torch.arange(mass.shape[1], device=mass.device)
        _, recent = self.protection.bounds(view, num_kept)
        open_entries = view.valid & (index < (view.lengths - recent)[:, None])
        num_heavy = (num_kept * self.heavy_fraction).floor().to(torch.int64)
        num_heavy = torch.minimum(num_heavy, open_entries.sum(dim=1))
        open_entries = open_entries & ~top_entries(mass, open_entries, num_heavy)
        cosines = neighbour_cosines(view.kv)
        before = pad(open_entries[:, :-1], (1, 0))
        able = open_entries & before & (cosines > -1.0)
        return cosines, able & ~weakest(cosines, able, (self.max_set + 1) // 2)

    def pivots(self, view: LayerView, mass: Tensor, groups: Groups) -> Tensor:
        return groups.highest(mass if self.pivot == "mass" else uniform_draws(view).float())

    def weigh(
        self, view: LayerView, mass: Tensor, groups: Groups, tokens: Tensor
    ) -> tuple[Tensor, None]:
        distance = key_distances(view.kv, self.pivots(view, mass, groups))
        if self.sigma:
            return torch.exp(-((distance / self.sigma) ** 2) / 2) * tokens, None
        count = groups.sum(torch.ones_like(mass))
        mean = groups.spread(groups.sum(distance) / count.clamp_min(1))
        near = torch.exp(-((distance / mean.clamp_min(1e-20)) ** 2))
        return torch.where(mean > 0, near, 1.0) * tokens, None


def weakest(cosines: Tensor, able: Tensor, size: int) -> Tensor:
    """[H, n] bool, true for the entry of the lowest cosine among every `size` entries.

    An entry that is not `able` counts as lowest, since a chain ends there anyway, as at the end.
    Two marked entries are at most 2 * size - 1 apart.
    """
    num_entries = cosines.shape[1]
    linkable = cosines.masked_fill(~able, -torch.inf)
    tiles = pad(linkable, (0, -num_entries % size), value=-torch.inf).unflatten(1, (-1, size))
    lowest = tiles.argmin(dim=2, keepdim=True)
    marked = torch.zeros_like(tiles, dtype=torch.bool).scatter(2, lowest, True)
    return marked.flatten(1)[:, :num_entries]
