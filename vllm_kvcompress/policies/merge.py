"""Evicted entries merged into kept ones: CaM (values), D2O (keys and values)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvcompress.kernels.scores_torch import finite
from vllm_kvcompress.policies.base import LayerView, Merged, Needs
from vllm_kvcompress.policies.measures import nearest_keys


@dataclass(frozen=True)
class CacheMerging:
    """CaM: an evicted value goes, with some probability, to the next kept entries.

    With the attention A accumulated so far, an evicted entry i and the next m kept ones T:
    p = clip(A_i / mean of A over T, 0, 1), and v_t += M v_i / |T| with M drawn from Bernoulli(p).
    Keys are dropped. Where no kept entry follows, the value is lost.

    Attributes:
        num_targets: m.
        window_size: queries observed at an event, at most.
        draw: random (the draw depends on layer, head and position alone) or expected (M = p).
    """

    corrects: ClassVar[bool] = False
    weighs_entries: ClassVar[bool] = False

    num_targets: int = 32
    window_size: int = 256
    draw: str = "random"

    @property
    def needs(self) -> Needs:
        """Accumulated attention, and values."""
        return Needs(window_size=self.window_size, values=True, accumulated=True)

    def state_size(self, head_size: int) -> int:
        """Nothing per head."""
        return 0

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Values with those of evicted entries added."""
        mass = view.accumulated
        assert mass is not None
        valid = view.valid
        evicted = valid & ~kept
        # Kept entries are numbered; an evicted one's targets are the numbers [first, last).
        number = kept.cumsum(dim=1)
        first = number
        last = torch.minimum(first + self.num_targets, number[:, -1:])
        count = last - first
        sums = _running_sums((mass * kept).double(), number, kept)
        mean = (sums.gather(1, last) - sums.gather(1, first)) / count.clamp_min(1)
        share = torch.where(mean > 0, mass / mean, (mass > 0).double()).clamp(0, 1)
        if self.draw == "random":
            share = (_uniform(view) < share).double()
        share = share.masked_fill(~evicted | (count == 0), 0) / count.clamp_min(1)
        parts = [
            _with_received(finite(view.values[h], valid[h]), share[h], first[h], last[h], kept[h])
            for h in view.head_slices(num_bytes=4 * 8)  # four temporaries in fp64
        ]
        return Merged(values=torch.cat(parts))


@dataclass(frozen=True)
class SimilarKeys:
    """D2O: an evicted entry goes to the kept entry of the most similar key, if similar enough.

    Similar enough is a cosine of at least theta, which starts as the mean of the evicted entries'
    best cosines and at each further event moves half way to theirs. A kept entry becomes the mean
    of itself, of weight 1, and of what came, of weights as their cosines; keys and values alike.

    Attributes:
        skip_layers: first layers, in which nothing is merged.
    """

    corrects: ClassVar[bool] = False
    weighs_entries: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(values=True)

    skip_layers: int = 2

    def state_size(self, head_size: int) -> int:
        """theta."""
        return 1

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Keys and values with evicted ones merged in, and theta."""
        num_heads = kept.shape[0]
        if view.layer < self.skip_layers:
            return Merged(state=torch.zeros(num_heads, 1, device=view.device))
        valid = view.valid
        evicted = valid & ~kept
        best, target = nearest_keys(view, kept)
        mean = best.sum(dim=1) / evicted.sum(dim=1).clamp_min(1)
        theta = mean if view.state is None else (view.state[:, 0] + mean) / 2
        weight = best.masked_fill(~evicted | (best < theta[:, None]), 0).clamp_min(0)
        total = 1 + torch.zeros_like(weight).scatter_add(1, target, weight)

        def merged(entries: Tensor, h: slice) -> Tensor:
            wide = finite(entries[h], valid[h]).float()
            index = target[h, :, None].expand_as(wide)
            sums = wide.scatter_add(1, index, weight[h, :, None] * wide)
            return (sums / total[h, :, None]).to(entries.dtype)

        heads = view.head_slices()
        keys = torch.cat([merged(view.keys, h) for h in heads])
        values = torch.cat([merged(view.values, h) for h in heads])
        return Merged(keys, values, theta[:, None])


def _with_received(
    values: Tensor, share: Tensor, first: Tensor, last: Tensor, kept: Tensor
) -> Tensor:
    """[H, n, D] values, kept ones with what the others add to them.

    Args:
        values: [H, n, D].
        share: [H, n] fp64 of each value that goes to each of its targets.
        first, last: [H, n] int64 its targets: kept entries by number, [first, last).
        kept: [H, n] bool.
    """
    added = share[..., None] * values.double()
    # What reaches a number: everything whose range has begun and not ended.
    wide = (-1, -1, added.shape[2])
    steps = added.new_zeros(added.shape[0], added.shape[1] + 1, added.shape[2])
    steps.scatter_add_(1, first[..., None].expand(*wide), added)
    steps.scatter_add_(1, last[..., None].expand(*wide), added.neg_())
    number = (kept.cumsum(dim=1) - 1).clamp_min(0)
    received = steps.cumsum(dim=1).gather(1, number[..., None].expand(*wide))
    return (values.double() + received * kept[..., None]).to(values.dtype)


def _running_sums(mass: Tensor, number: Tensor, kept: Tensor) -> Tensor:
    """[H, n + 1]: at place i the mass of the first i kept entries."""
    sums = mass.new_zeros(mass.shape[0], mass.shape[1] + 1)
    return sums.scatter_add(1, number * kept, mass * kept).cumsum(dim=1)


def _uniform(view: LayerView) -> Tensor:
    """[H, n] numbers in [0, 1) that depend on layer, head and place alone (splitmix64's mixing)."""
    head = torch.arange(view.num_heads, device=view.device)[:, None]
    place = torch.arange(view.num_entries, device=view.device)
    bits = (view.layer * 1_000_003 + head) * 4_294_967_311 + place + 1
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = (bits ^ ((bits >> 31) & ((1 << 33) - 1))) & ((1 << 52) - 1)
    return bits.double() / (1 << 52)
