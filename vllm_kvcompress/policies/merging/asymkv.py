"""Homogeneous Keys, Heterogeneous Values: Exploiting Local KV Cache Asymmetry for Long-Context
LLMs, arXiv 2506.05410."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvcompress.kernels.dispatch import reads_sizes
from vllm_kvcompress.kernels.merging.pairs import (
    PART,
    Pairs,
    disjoint_links,
    max_rounds,
    pair_weights,
)
from vllm_kvcompress.policies import LayerView, Needs, Protection, Stages, parameter
from vllm_kvcompress.policies.merging import groups as grouping
from vllm_kvcompress.policies.merging.groups import GroupMerging, Groups
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.parts.parameters import switch
from vllm_kvcompress.rounding import ceil_div

OBSERVED = -1
GAMMA = 4096 / 6.238324625039508  # 4096 / ln 512: how fast later pairs become lighter


@dataclass(frozen=True)
class AsymKV(GroupMerging):
    """Merges neighbours of little attention, with keys weighted by a proxy of the gradients.

    u_i = (m_i + m_{i+1}) (L_i + L_{i+1}) exp(-(i + 1) / gamma), i counted after the sinks; the
    smallest pairs merge. L is how many tokens an entry stands for. The authors choose the same
    pairs for all heads of a layer; here each head has its own, since heads hold different numbers
    of entries.

    Pairs are disjoint, and merge in rounds, as the authors merge chunk by chunk: a round takes at
    most a third of the links, and in the next one a merged entry has the attention and tokens of
    both.

    Recent entries are never linked: few queries have seen them, so their mass is small, and the
    authors compress the past only. They take at most half of what sinks leave, or all entries
    between would become a few.

    Keys are weighted without gradients: h = alpha^2 |v - o|^2, with an isotropic upstream gradient.
    With `running` the gradients' sizes alpha |v - o| of all events are added up before they are
    squared, those of merged entries included, which weighs a pair like the authors' mean over
    chunks.
    """

    name = "asymkv"
    batches = True
    stages = Stages(
        score="mean attention of the last window_size queries",
        protect="the first num_sinks tokens, and the last num_recent from being merged",
        allocate="the same for every layer and head",
        select="disjoint pairs of neighbours with the least attention, later ones first, in rounds",
        merge="a pair's keys by weight, values by how many tokens they stand for",
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
        num_recent = self.window_size if self.num_recent == OBSERVED else self.num_recent
        unlinked = Protection(self.num_sinks, num_recent)
        sinks, recent = unlinked.bounds(view, (num_kept - 1).clamp_min(0))
        # Merged entries are at least as many as recent ones, and at least one.
        recent = torch.minimum(recent, (num_kept - sinks).clamp_min(0) // 2)
        entries = _Remaining.of(view, mass)
        needed = (view.lengths - num_kept).clamp_min(0)
        joined = torch.zeros(mass.shape, dtype=torch.int64, device=mass.device)
        for number in range(1, max_rounds(view.num_entries) + 1):
            if reads_sizes(joined.device) and not needed.any():
                break
            taken = torch.minimum(needed, ceil_div(entries.lengths - recent - sinks - 1, PART))
            link = entries.lightest(sinks, recent, taken.clamp_min(0))
            joined.scatter_add_(1, entries.places, link * number)
            entries, needed = entries.merged(link), needed - taken
        return joined

    def weigh(
        self, view: LayerView, mass: Tensor, groups: Groups, tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        clean = mass.masked_fill(~groups.valid, 0)
        shares = clean / clean.sum(dim=1, keepdim=True).clamp_min(1e-30)
        former = None
        if self.needs.running:
            running = view.entries.running
            former = torch.zeros_like(mass) if running is None else running
        return pair_weights(view.kv, groups.joined, shares, tokens, former, self)

    @property
    def order(self) -> int:
        """Order of the residuals' norms."""
        return 2

    def sizes(self, shares: Tensor, norms: Tensor) -> Tensor:
        """Sizes of keys' gradients, up to a common factor."""
        return shares * norms

    def weigh_pairs(self, pairs: Pairs) -> Tensor:
        """[2, P] squared gradients."""
        return pairs.sizes**2

    def carry(self, pairs: Pairs, weights: Tensor) -> Tensor:
        """[P] sums of both entries' gradients."""
        return pairs.sizes.sum(dim=0)


@dataclass(frozen=True)
class _Remaining:
    """Entries that are left after some rounds, each head's first.

    Attributes:
        mass: [H, n] fp32 attention.
        tokens: [H, n] fp32 tokens that they stand for.
        places: [H, n] int64 place of each one before the first round.
        lengths: [H] int64.
    """

    mass: Tensor
    tokens: Tensor
    places: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, view: LayerView, mass: Tensor) -> _Remaining:
        """All entries of a view."""
        clean = torch.nan_to_num(mass, nan=0.0).masked_fill(~view.valid, 0)
        places = torch.arange(view.num_entries, device=view.device).expand_as(mass)
        return cls(clean, grouping.tokens_of(view), places, view.lengths)

    def lightest(self, sinks: Tensor, recent: Tensor, number: Tensor) -> Tensor:
        """[H, n] bool, true for entries that join the one before: disjoint, by AsymKV's weight."""
        mass, tokens = (each + pad(each[:, :-1], (1, 0)) for each in (self.mass, self.tokens))
        index = torch.arange(mass.shape[1], device=mass.device) - sinks[:, None]
        able = (index > 0) & (index < (self.lengths - recent - sinks)[:, None])
        weights = (mass * tokens).clamp_min(0).log() - index / GAMMA
        return disjoint_links(weights, able, number)

    def merged(self, link: Tensor) -> _Remaining:
        """Entries after one round."""
        width, lengths = link.shape[1], self.lengths - link.sum(dim=1)
        index = torch.arange(width, device=link.device).expand_as(link)
        place = torch.where(link, width, (~link).cumsum(dim=1) - 1)
        source = torch.zeros(len(link), width + 1, dtype=torch.int64, device=link.device)
        source.scatter_(1, place, index)
        source = source[:, : int(lengths.max()) if reads_sizes(link.device) else width]
        mass, tokens = (x + pad((x * link)[:, 1:], (0, 1)) for x in (self.mass, self.tokens))
        mass, tokens, places = (x.gather(1, source) for x in (mass, tokens, self.places))
        return _Remaining(mass, tokens, places, lengths)
