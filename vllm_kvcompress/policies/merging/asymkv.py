"""Homogeneous Keys, Heterogeneous Values: Exploiting Local KV Cache Asymmetry for Long-Context
LLMs, arXiv 2506.05410."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.neighbours import value_residuals
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import LayerView, Needs, Protection, Stages, parameter
from vllm_kvcompress.policies.merging import groups as grouping
from vllm_kvcompress.policies.merging.groups import GroupMerging, GroupSums
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.parts.parameters import switch

OBSERVED = -1
GAMMA = 4096 / 6.238324625039508  # 4096 / ln 512: how fast later pairs become lighter


@dataclass(frozen=True)
class AsymKV(GroupMerging):
    """Merges neighbours of little attention, with keys weighted by a proxy of the gradients.

    u_i = (m_i + m_{i+1}) (L_i + L_{i+1}) exp(-(i + 1) / gamma), i counted after the sinks; the
    smallest are linked. L is how many tokens an entry stands for. The authors choose the same links
    for all heads of a layer; here each head has its own, since heads hold different numbers of
    entries.

    Recent entries are never linked: few queries have seen them, so their mass is small, and the
    authors compress the past only. They take at most half of what sinks leave, or all entries
    between would become a few groups.

    Keys are weighted without gradients: h = alpha^2 |v - o|^2, with an isotropic upstream gradient.
    With `running` the gradients' sizes alpha |v - o| of all events are added up before they are
    squared, those of merged entries included, which weighs a group like the authors' mean over
    chunks.
    """

    name = "asymkv"
    batches = True
    stages = Stages(
        score="mean attention of the last window_size queries",
        protect="the first num_sinks tokens, and the last num_recent from being merged",
        allocate="the same for every layer and head",
        select="links of neighbours with the least attention, later ones first",
        merge="a group's keys by weight, values by how many tokens they stand for",
    )

    window_size: int = parameter(128, "last queries whose attention is averaged", minimum=1)
    num_sinks: int = parameter(32, "first tokens kept", minimum=0)
    num_recent: int = parameter(
        OBSERVED, f"last tokens that are not merged; {OBSERVED}: as many as are observed", OBSERVED
    )
    merge_space: str = parameter(
        "unrotated", grouping.MERGE_SPACE, choices=("rotated", "unrotated")
    )
    running: str = switch("on: weights of keys add up over events")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, running=self.running == "on")

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.num_sinks)

    def score(self, view: LayerView) -> Tensor:
        return observed_mass(view)

    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        index = torch.arange(mass.shape[1], device=mass.device)
        num_recent = self.window_size if self.num_recent == OBSERVED else self.num_recent
        unlinked = Protection(self.num_sinks, num_recent)
        sinks, recent = unlinked.bounds(view, (num_kept - 1).clamp_min(0))
        # Groups get at least as many entries as recent ones do, and at least one.
        recent = torch.minimum(recent, (num_kept - sinks).clamp_min(0) // 2)
        sinks, recent = sinks[:, None], recent[:, None]
        tokens = grouping.tokens_of(view)
        pair = (mass + _shifted(mass)) * (tokens + _shifted(tokens))
        weight = pair.clamp_min(0).log() - (index - sinks) / GAMMA
        able = (index > sinks) & (index < view.lengths[:, None] - recent)
        return top_entries(-weight, able, grouping.links_needed(view, num_kept, able))

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        """[H, n] fp32 squared gradients; tokens where a group's sum is 0."""
        return unless_zero(groups, self._gradients(view, mass, groups) ** 2, tokens)

    def add_up(
        self, view: LayerView, mass: Tensor, groups: GroupSums, weight: Tensor
    ) -> Tensor | None:
        return groups.sum(self._gradients(view, mass, groups))

    def _gradients(self, view: LayerView, mass: Tensor, groups: GroupSums) -> Tensor:
        """[H, n] fp32 sizes of keys' gradients, up to a common factor."""
        alpha = shares_of(mass, groups)
        return with_former(view, alpha * value_residuals(view.kv, alpha, order=2)[0])


def _shifted(values: Tensor) -> Tensor:
    """Value of the entry before each; 0 for the first."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def shares_of(mass: Tensor, groups: GroupSums) -> Tensor:
    """[H, n] mass as a share of all entries', 0 for padding."""
    clean = mass.masked_fill(~groups.valid, 0)
    return clean / clean.sum(dim=1, keepdim=True).clamp_min(1e-30)


def with_former(view: LayerView, term: Tensor) -> Tensor:
    """[H, n] term of this event plus the sum of former events."""
    running = view.entries.running
    return term if running is None else term + running


def unless_zero(groups: GroupSums, weight: Tensor, tokens: Tensor) -> Tensor:
    """Replaces weights by tokens in groups where their sum is 0 or not finite."""
    total = groups.sum(weight)
    usable = groups.spread((total > 0) & torch.isfinite(total))
    return torch.where(usable, weight, tokens).masked_fill(~groups.valid, 0)
