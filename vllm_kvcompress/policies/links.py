"""Merging neighbours: which entries join the one before, and what becomes of a group.

A link joins an entry to the one before it; a chain of links is a group, and its first entry stands
for it from then on. Entries carry how many tokens they stand for as a bias, its logarithm.
KVMerger, AsymKV (arXiv 2506.05410), KVSlimmer (arXiv 2603.00907).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from vllm_kvcompress.kernels.scores_torch import finite
from vllm_kvcompress.kernels.selection import top_entries
from vllm_kvcompress.policies.base import LayerView, Merged, Needs
from vllm_kvcompress.policies.measures import merged_groups, neighbour_cosines
from vllm_kvcompress.policies.protect import Protection


class Links(Protocol):
    """Chooses links, never more than are needed to leave `num_kept` groups per head."""

    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        """[H, n] bool: joins the entry before. `mass` [H, n], `num_kept` [H]."""
        ...


@dataclass(frozen=True)
class CosineLinks:
    """KVMerger: neighbours of the most similar keys, but neither recent nor heavy entries.

    Attributes:
        recent_fraction, heavy_fraction: of what is kept; left alone, as the latest or as those
            of the highest mass.
        min_cosine: less similar neighbours are never linked.
        max_set: entries of a group, at most.
    """

    recent_fraction: float = 0.34
    heavy_fraction: float = 0.24
    min_cosine: float = -1.0
    max_set: int = 64

    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        """[H, n] bool."""
        nth = torch.arange(mass.shape[1], device=mass.device)
        valid = view.valid
        _, recent = Protection(recent_fraction=self.recent_fraction).bounds(view, num_kept)
        open_entries = valid & (nth < (view.lengths - recent)[:, None])
        num_heavy = (num_kept * self.heavy_fraction).floor().to(torch.int64)
        num_heavy = torch.minimum(num_heavy, open_entries.sum(dim=1))
        open_entries = open_entries & ~top_entries(mass, open_entries, num_heavy)
        cosines = neighbour_cosines(view)
        able = open_entries & _before(open_entries) & (nth % self.max_set != 0)
        able = able & (cosines > self.min_cosine)
        return top_entries(cosines, able, _needed(view, num_kept, able))


@dataclass(frozen=True)
class LightLinks:
    """AsymKV and KVSlimmer: neighbours of little mass, the earlier the less readily.

    u_i = (m_i + m_{i+1}) (L_i + L_{i+1}) exp(-(i + 1) / gamma), i counted behind the sinks; the
    smallest are linked. L is how many tokens an entry stands for. The authors choose the same
    links for all heads of a layer; here each head has its own, since heads hold different numbers
    of entries.

    Attributes:
        num_sinks: first entries, left alone.
        gamma: how fast later pairs become lighter.
    """

    num_sinks: int = 32
    gamma: float = 4096 / 6.238324625039508  # ln 512

    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        """[H, n] bool."""
        nth = torch.arange(mass.shape[1], device=mass.device)
        valid = view.valid
        sinks = (num_kept - 1).clamp(0, self.num_sinks)[:, None]
        tokens = tokens_of(view)
        pair = (mass + _shifted(mass)) * (tokens + _shifted(tokens))
        weight = pair.clamp_min(0).log() - (nth - sinks) / self.gamma
        able = valid & (nth > sinks)
        return top_entries(-weight, able, _needed(view, num_kept, able))


@dataclass(frozen=True)
class Groups:
    """Keeps the first entries of groups; the lightest groups go where there are too many.

    Attributes:
        links: what joins.
    """

    needs: ClassVar[Needs] = Needs()

    links: Links

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h."""
        first = view.valid
        first = first & ~self.links.choose(view, scores, kept)
        sure = scores.masked_fill(protection.mask(view, kept), float("inf"))
        return top_entries(sure, first, kept)


def tokens_of(view: LayerView) -> Tensor:
    """[H, n] fp32: how many tokens each entry stands for."""
    if view.bias is None:
        return torch.ones(view.num_heads, view.num_entries, device=view.device)
    return view.bias.exp()


def _needed(view: LayerView, num_kept: Tensor, able: Tensor) -> Tensor:
    return torch.minimum((view.lengths - num_kept).clamp_min(0), able.sum(dim=1))


def _shifted(values: Tensor) -> Tensor:
    """Each entry's value replaced by that of the one before; 0 for the first."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def _before(flags: Tensor) -> Tensor:
    return torch.nn.functional.pad(flags[:, :-1], (1, 0))


@dataclass(frozen=True)
class GroupSums:
    """Sums over groups, written to the place of each group's first entry.

    Attributes:
        place: [H, n] int64 place of the first entry of each entry's group.
        valid: [H, n] bool.
    """

    place: Tensor
    valid: Tensor

    @classmethod
    def of(cls, view: LayerView, link: Tensor) -> GroupSums:
        """The groups that links make."""
        valid = view.valid
        nth = torch.arange(link.shape[1], device=link.device).expand_as(link)
        return cls(torch.where(link, 0, nth).cummax(dim=1).values, valid)

    def heads(self, which: slice) -> GroupSums:
        """Those of some heads."""
        return GroupSums(self.place[which], self.valid[which])

    def sum(self, values: Tensor) -> Tensor:
        """[H, n] or [H, n, D] fp32, 0 elsewhere; padding does not count."""
        if values.dim() == 2:
            clean = values.masked_fill(~self.valid, 0)
            return torch.zeros_like(clean).scatter_add(1, self.place, clean)
        clean = finite(values, self.valid)
        # Rows of several heads as rows of one: adding whole rows is much faster than scattering.
        first = torch.arange(len(clean), device=clean.device)[:, None] * clean.shape[1]
        index = (self.place + first).flatten()
        rows = clean.flatten(0, 1)
        return torch.zeros_like(rows).index_add_(0, index, rows).view_as(clean)

    def spread(self, values: Tensor) -> Tensor:
        """[H, n] every entry gets its group's value."""
        return values.gather(1, self.place)

    def last(self, positions: Tensor) -> Tensor:
        """[H, n] int64 for every entry the highest position of its group."""
        clean = positions.masked_fill(~self.valid, -1)
        top = torch.zeros_like(clean).scatter_reduce(1, self.place, clean, "amax")
        return self.spread(top)

    def highest(self, values: Tensor) -> Tensor:
        """[H, n] int64 for every entry the place of its group's highest value, the first one."""
        clean = values.masked_fill(~self.valid, float("-inf"))
        top = torch.full_like(clean, float("-inf"))
        top = top.scatter_reduce(1, self.place, clean, "amax")
        nth = torch.arange(values.shape[1], device=values.device).expand_as(self.place)
        far = torch.full_like(self.place, values.shape[1])
        at_top = torch.where(clean == self.spread(top), nth, far)
        found = far.scatter_reduce(1, self.place, at_top, "amin")
        return self.spread(found).clamp_max(values.shape[1] - 1)


class KeyWeights(Protocol):
    """Weights of the keys of a group; need not sum to one."""

    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        """[H, n] fp32, not negative, with a positive sum over every group."""
        ...


@dataclass(frozen=True)
class GroupMerger:
    """Merges groups: weighted keys, values by how many tokens they stand for.

    Attributes:
        links: what joins; the selector's.
        weights: of keys.
        value_mode: lossless (mean of values, and the logarithm of the tokens as bias), mean (no
            bias), or paper (KVMerger's: the mean times the entries of the group, no bias).
        values_like_keys: values get the keys' weights (KVMerger).
        merge_space: rotated (keys as they are cached) or unrotated (as they would be at one
            position, where the merged one then is).
        merge_position: last (the group's last entry's) or pivot (that of the highest mass).
    """

    corrects: ClassVar[bool] = False

    links: Links
    weights: KeyWeights
    value_mode: str = "lossless"
    values_like_keys: bool = False
    merge_space: str = "rotated"
    merge_position: str = "last"

    @property
    def needs(self) -> Needs:
        """Values, and for unrotated keys their positions."""
        return Needs(values=True, plain_logits=True, positions=self.merge_space == "unrotated")

    @property
    def weighs_entries(self) -> bool:
        """Whether multiplicities are carried."""
        return self.value_mode == "lossless"

    def state_size(self, head_size: int) -> int:
        """Nothing per head."""
        return 0

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Every group's first entry takes the whole group's key, value and tokens."""
        link = self.links.choose(view, scores, kept.sum(dim=1))
        whole = GroupSums.of(view, link)
        tokens = tokens_of(view).masked_fill(~whole.valid, 0)
        over_pages = view.pages is not None and self.value_mode != "paper"
        heads = [slice(0, view.num_heads)] if over_pages else view.head_slices()
        views = [view] if over_pages else [view.heads(h) for h in heads]
        weights = [
            self.weights.weigh(views[i], scores[h], whole.heads(h), tokens[h])
            for i, h in enumerate(heads)
        ]
        steps, positions = self._turns(view, scores, whole)
        if over_pages:
            weight = torch.cat(weights)
            own = weight if self.values_like_keys else tokens
            keys, values = merged_groups(view, link, weight, own, steps)
        else:
            merged = [
                self._merge(
                    views[i],
                    whole.heads(h),
                    weights[i],
                    weights[i] if self.values_like_keys else tokens[h],
                    None if steps is None else steps[h],
                )
                for i, h in enumerate(heads)
            ]
            keys, values = (torch.cat(parts) for parts in zip(*merged, strict=True))
        received = view.accumulated
        return Merged(
            keys,
            values,
            bias=whole.sum(tokens).clamp_min(1).log() if self.weighs_entries else None,
            positions=positions,
            accumulated=None if received is None else whole.sum(received),
        )

    def _turns(
        self, view: LayerView, scores: Tensor, groups: GroupSums
    ) -> tuple[Tensor | None, Tensor | None]:
        """[H, n] by how many positions keys are turned, and where that puts them; None: not."""
        if self.merge_space == "rotated":
            return None, None
        assert view.positions is not None
        positions = groups.last(view.positions)
        if self.merge_position == "pivot":
            positions = view.positions.gather(1, groups.highest(scores))
        return positions - view.positions, positions

    def _merge(
        self,
        view: LayerView,
        groups: GroupSums,
        key_weights: Tensor,
        value_weights: Tensor,
        steps: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of some heads."""
        alone = groups.sum(torch.ones_like(key_weights))
        # An entry by itself stays as it is, to the bit.
        single = (alone == 1)[..., None]
        keys = view.keys
        if steps is not None:
            assert view.rotary is not None
            keys = view.rotary.turn(finite(keys, groups.valid).float(), steps)
        keys = torch.where(single, view.keys, _mean(groups, key_weights, keys).to(view.keys.dtype))
        values = _mean(groups, value_weights, view.values)
        if self.value_mode == "paper":
            values = values * alone[..., None]
        return keys, torch.where(single, view.values, values.to(view.values.dtype))


def _mean(groups: GroupSums, weight: Tensor, entries: Tensor) -> Tensor:
    """[H, n, D] fp32 weighted mean of each group, at the place of its first entry."""
    sums = groups.sum(weight[..., None] * finite(entries, groups.valid).float())
    return sums / groups.sum(weight).clamp_min(1e-30)[..., None]
