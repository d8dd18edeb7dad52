"""Evicted entries merged into kept ones: CaM (values), D2O (keys and values)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Merged, Needs
from vllm_kvcompress.policies.measures import merged_into, nearest_keys, spread_values


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
        return Merged(values=spread_values(view, kept, share, self.num_targets))


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
        keys, values = merged_into(view, kept, target, weight)
        return Merged(keys, values, theta[:, None])


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
