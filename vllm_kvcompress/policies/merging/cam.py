"""CaM (ICML 2024): evicted values are added to the next kept ones."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.spread_values import spread_values
from vllm_kvcompress.policies import (
    LayerView,
    Merged,
    Merger,
    Modifier,
    Needs,
    Pipeline,
    Stages,
    parameter,
)


@dataclass(frozen=True)
class CaM(Modifier, Merger):
    """An evicted value goes, with some probability, to the next kept entries.

    With the attention A accumulated so far, an evicted entry i and the next m kept ones T:
    p = clip(A_i / mean of A over T, 0, 1), and v_t += M v_i / |T| with M drawn from Bernoulli(p),
    or M = p. The draw depends on layer, head and position alone. Keys are dropped. Where no kept
    entry follows, the value is lost.
    """

    name = "cam"
    paper = "CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024"
    summary = "Evicted values are added, with some probability, to the next kept ones."
    stages = Stages(merge="values of evicted tokens, spread over the next num_targets kept ones")
    goes_on = ("streamingllm", "h2o")
    otherwise = "cam was made for policies whose kept tokens move on, and {} is none of them"

    num_targets: int = parameter(32, "kept tokens that share an evicted value", minimum=1)
    merge_window: int = parameter(256, "last queries of an event that are observed", minimum=1)
    draw: str = parameter(
        "random",
        "random (with probability p) or expected (weighted by p)",
        choices=("random", "expected"),
    )

    def modify(self, base: Pipeline) -> Pipeline:
        return replace(base, merger=self)

    @property
    def needs(self) -> Needs:
        return Needs(window_size=self.merge_window, values=True, accumulated=True)

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
        return Merged(values=spread_values(view.kv, kept, share, self.num_targets))


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
