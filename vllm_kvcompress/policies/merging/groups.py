"""Merging neighbours: which tokens join the one before, and what becomes of a group.

A link joins an entry to the one before it; a chain of links is a group, and its first entry stands
for it from then on. Entries hold how many tokens they stand for as a bias, its logarithm.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.merging.merge_groups import merge_groups
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import LayerView, Merged, Merger, Needs, Policy, Protection

MERGE_SPACE = "keys as they are cached (rotated), or re-rotated to one position first (unrotated)"


class GroupMerging(Policy, Merger):
    """Keeps the first entries of groups, which take the whole group's key, value and tokens.

    Where there are too many groups the lightest go.

    Attributes:
        window_size: last queries observed.
        value_mode: lossless (mean of values, and the logarithm of the tokens as bias), mean (no
            bias), or paper (KVMerger's: the mean times the entries of the group, no bias).
        values_like_keys: values get the keys' weights, not by how many tokens they stand for.
        merge_space: rotated (keys as they are cached) or unrotated (as they would be at one
            position, where the merged one then is).
        merge_position: last (the group's last entry's) or pivot (that of the highest mass).
    """

    window_size: int
    value_mode: str = "lossless"
    values_like_keys: bool = False
    merge_space: str
    merge_position: str = "last"

    @abstractmethod
    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        """[H, n] bool: joins the entry before, never more than leave `num_kept` [H] groups."""

    @abstractmethod
    def weigh(self, view: LayerView, mass: Tensor, groups: GroupSums, tokens: Tensor) -> Tensor:
        """[H, n] fp32 weights of keys, not negative, with a positive sum over every group."""

    def pivots(self, view: LayerView, mass: Tensor, groups: GroupSums) -> Tensor:
        """[H, n] int64 for every entry the place of its group's pivot: the highest mass."""
        return groups.highest(mass)

    def add_up(
        self, view: LayerView, mass: Tensor, groups: GroupSums, weight: Tensor
    ) -> Tensor | None:
        """[H, n] fp32 what a next event is to add to, of groups at their first entries.

        As mergers have it that need what runs; None: nothing.
        """
        return None

    @property
    def needs(self) -> Needs:
        """The last queries, values, and for unrotated keys their positions."""
        unrotated = self.merge_space == "unrotated"
        return Needs(self.window_size, values=True, plain_logits=True, positions=unrotated)

    @property
    def weighs_entries(self) -> bool:
        return self.value_mode == "lossless"

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h."""
        first = view.valid & ~self.choose(view, scores, kept)
        sure = scores.masked_fill(protection.mask(view, kept), float("inf"))
        return top_entries(sure, first, kept)

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Every group's first entry takes the whole group's key, value and tokens."""
        link = self.choose(view, scores, kept.sum(dim=1))
        whole = GroupSums.of(view, link)
        tokens = tokens_of(view).masked_fill(~whole.valid, 0)
        weight = self.weigh(view, scores, whole, tokens)
        rerotated, positions = self._rerotated(view, scores, whole)
        keys, values = merge_groups(
            view.kv,
            link,
            weight,
            weight if self.values_like_keys else tokens,
            rerotated,
            sum_values=self.value_mode == "paper",
        )
        received = view.entries.accumulated
        return Merged(
            keys,
            values,
            bias=whole.sum(tokens).clamp_min(1).log() if self.weighs_entries else None,
            positions=positions,
            running=self.add_up(view, scores, whole, weight) if self.needs.running else None,
            accumulated=None if received is None else whole.sum(received),
        )

    def _rerotated(
        self, view: LayerView, scores: Tensor, groups: GroupSums
    ) -> tuple[tuple[Rotary, Tensor] | None, Tensor | None]:
        """How and by how many positions keys are re-rotated, and where that puts them."""
        if self.merge_space == "rotated":
            return None, None
        assert view.entries.positions is not None
        assert view.rotary is not None
        positions = groups.last(view.entries.positions)
        if self.merge_position == "pivot":
            positions = view.entries.positions.gather(1, self.pivots(view, scores, groups))
        return (view.rotary, positions - view.entries.positions), positions


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

    def sum(self, values: Tensor) -> Tensor:
        """[H, n] fp32, 0 elsewhere; padding does not count."""
        clean = values.masked_fill(~self.valid, 0)
        return torch.zeros_like(clean).scatter_add(1, self.place, clean)

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


def tokens_of(view: LayerView) -> Tensor:
    """[H, n] fp32: how many tokens each entry stands for."""
    if view.entries.bias is None:
        return torch.ones(view.num_heads, view.num_entries, device=view.device)
    return view.entries.bias.exp()


def links_needed(view: LayerView, num_kept: Tensor, able: Tensor) -> Tensor:
    """[H] links that leave `num_kept` groups per head, of those that are possible."""
    return torch.minimum((view.lengths - num_kept).clamp_min(0), able.sum(dim=1))
