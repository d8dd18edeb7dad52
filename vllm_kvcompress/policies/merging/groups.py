"""Merging neighbours: links join an entry to the one before it, and a chain of links is a group.

A group's first entry stands for it after the event. The logarithm of how many tokens an entry
stands for is kept as its bias.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.merging.merged_entries import merge_groups
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import LayerView, Merged, Merger, Needs, Policy, Protection

MERGE_SPACE = "merge keys as cached (rotated), or re-rotated to one position (unrotated)"


class GroupMerging(Policy, Merger):
    """Keeps the first entry of each group, with the merged key and value of the group.

    Where there are too many groups, those of the lowest scores are evicted.

    Attributes:
        window_size: last queries observed.
        value_mode: lossless (mean of values, and the logarithm of the tokens as bias), mean (no
            bias), or paper (KVMerger's: the mean times the entries of the group, no bias).
        values_like_keys: whether values are weighted like keys, or by how many tokens they stand
            for.
        merge_space: rotated (keys as they are cached) or unrotated (keys re-rotated to one
            position, which the merged key then has).
        merge_position: last (position of the group's last entry) or pivot (that of the highest
            mass).
    """

    window_size: int
    value_mode: str = "lossless"
    values_like_keys: bool = False
    merge_space: str
    merge_position: str = "last"

    @abstractmethod
    def choose(self, view: LayerView, mass: Tensor, num_kept: Tensor) -> Tensor:
        """[H, n] not 0 for entries that join the one before (pairs: in which round).

        Leaves `num_kept` [H] groups.
        """

    @abstractmethod
    def weigh(
        self, view: LayerView, mass: Tensor, groups: Groups, tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Weights keys, and says what goes on to the next event.

        Returns:
            [H, n] fp32 weights of keys, not negative, with a positive sum over every group; and
            [H, n] fp32 `EntryState.running` of groups, at their first entries (None: not kept).
        """

    def pivots(self, view: LayerView, mass: Tensor, groups: Groups) -> Tensor:
        """[H, n] int64 index of the pivot of each entry's group: the entry of the highest mass."""
        return groups.highest(mass)

    @property
    def needs(self) -> Needs:
        unrotated = self.merge_space == "unrotated"
        return Needs(self.window_size, values=True, plain_logits=True, positions=unrotated)

    @property
    def weighs_entries(self) -> bool:
        return self.value_mode == "lossless"

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        first = view.valid & (self.choose(view, scores, kept) == 0)
        protected = protection.mask(view, kept)
        return top_entries(scores.masked_fill(protected, float("inf")), first, kept)

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Merges the key, value and tokens of each group into its first entry."""
        groups = Groups.of(view, self.choose(view, scores, kept.sum(dim=1)))
        tokens = tokens_of(view)
        weight, running = self.weigh(view, scores, groups, tokens)
        rerotated, positions = self._rerotated(view, scores, groups)
        keys, values = merge_groups(
            view.kv,
            groups.joined > 0,
            weight,
            weight if self.values_like_keys else tokens,
            rerotated,
            sum_values=self.value_mode == "paper",
        )
        received = view.entries.accumulated
        return Merged(
            keys,
            values,
            bias=groups.sum(tokens).clamp_min(1).log() if self.weighs_entries else None,
            positions=positions,
            running=running,
            accumulated=None if received is None else groups.sum(received),
        )

    def _rerotated(
        self, view: LayerView, scores: Tensor, groups: Groups
    ) -> tuple[tuple[Rotary, Tensor] | None, Tensor | None]:
        """How and by how many positions keys are re-rotated, and the positions that they get."""
        if self.merge_space == "rotated":
            return None, None
        assert view.entries.positions is not None
        assert view.rotary is not None
        positions = groups.last(view.entries.positions)
        if self.merge_position == "pivot":
            positions = view.entries.positions.gather(1, self.pivots(view, scores, groups))
        return (view.rotary, positions - view.entries.positions), positions


@dataclass(frozen=True)
class Groups:
    """Groups of linked entries, with reductions over each.

    Attributes:
        joined: [H, n] not 0 for entries that join the one before.
        first: [H, n] int64 index of the first entry of each entry's group.
        valid: [H, n] bool, true below each head's length.
    """

    joined: Tensor
    first: Tensor
    valid: Tensor

    @classmethod
    def of(cls, view: LayerView, joined: Tensor) -> Groups:
        """Groups of entries that join the one before."""
        index = torch.arange(joined.shape[1], device=joined.device).expand_as(joined)
        first = torch.where(joined > 0, 0, index).cummax(dim=1).values
        return cls(joined, first, view.valid)

    def sum(self, values: Tensor) -> Tensor:
        """[H, n] fp32 sums at the first entries, 0 elsewhere; padding does not count."""
        clean = values.masked_fill(~self.valid, 0)
        return torch.zeros_like(clean).scatter_add(1, self.first, clean)

    def spread(self, values: Tensor) -> Tensor:
        """[H, n] value at the first entry of each entry's group."""
        return values.gather(1, self.first)

    def last(self, positions: Tensor) -> Tensor:
        """[H, n] int64 highest position of each entry's group."""
        clean = positions.masked_fill(~self.valid, -1)
        top = torch.zeros_like(clean).scatter_reduce(1, self.first, clean, "amax")
        return self.spread(top)

    def highest(self, values: Tensor) -> Tensor:
        """[H, n] int64 index of the highest value of each entry's group, or the first such."""
        clean = values.masked_fill(~self.valid, float("-inf"))
        top = torch.full_like(clean, float("-inf"))
        top = top.scatter_reduce(1, self.first, clean, "amax")
        index = torch.arange(values.shape[1], device=values.device).expand_as(self.first)
        none = torch.full_like(self.first, values.shape[1])
        at_top = torch.where(clean == self.spread(top), index, none)
        highest = none.scatter_reduce(1, self.first, at_top, "amin")
        return self.spread(highest).clamp_max(values.shape[1] - 1)


def tokens_of(view: LayerView) -> Tensor:
    """[H, n] fp32 number of tokens that each entry stands for; 0 for padding."""
    if view.entries.bias is None:
        return view.valid.float()
    return view.entries.bias.exp().masked_fill(~view.valid, 0)
