"""CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.merged_entries import spread_values
from vllm_kvcompress.policies import Modifier, Pipeline, Stages, parameter
from vllm_kvcompress.policies.base import LayerView, Merged, Merger, Needs


@dataclass(frozen=True)
class CaM(Modifier, Merger):
    """Adds evicted values, with some probability, to the next kept ones.

    With the accumulated attention A, an evicted entry i and the next m kept ones T:
    p = clip(A_i / mean of A over T, 0, 1), and v_t += M v_i / |T| with M drawn from Bernoulli(p),
    or M = p. The draw depends on layer, head and position alone. Keys are dropped, and so is a
    value that no kept entry follows.

    The paper evicts one token per step, so that a kept one is among the next of |T| tokens at most
    and receives no more than one value in all. An event evicts many at once: where the shares that
    reach a kept entry exceed `max_received` in sum, they are scaled down to it. A tenth of a value
    lost least text.
    """

    name = "cam"
    batches = True
    stages = Stages(merge="values of evicted tokens, spread over the next num_targets kept ones")
    goes_on = ("streamingllm", "h2o")
    otherwise = "cam was made for policies that keep a moving window, and {} is none of them"

    num_targets: int = parameter(32, "kept tokens that share an evicted value", minimum=1)
    merge_window: int = parameter(256, "last queries of an event that are observed", minimum=1)
    max_received: float = parameter(
        0.1, "values that a kept token receives per event at most, by weight", minimum=0.0
    )
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
        """Adds shares of evicted values to kept ones."""
        mass = view.entries.accumulated
        assert mass is not None
        evicted = view.valid & ~kept
        # Kept entries are numbered; an evicted one's targets are the numbers [first, last).
        first = kept.cumsum(dim=1)
        last = torch.minimum(first + self.num_targets, first[:, -1:])
        count = last - first
        sums = _running_sums((mass * kept).double(), first, kept)
        mean = (sums.gather(1, last) - sums.gather(1, first)) / count.clamp_min(1)
        share = torch.where(mean > 0, mass / mean, (mass > 0).double()).clamp(0, 1)
        if self.draw == "random":
            share = (uniform_draws(view) < share).double()
        share = share.masked_fill(~evicted | (count == 0), 0) / count.clamp_min(1)
        return Merged(
            values=spread_values(view.kv, kept, share, self.num_targets, self.max_received)
        )


def _running_sums(mass: Tensor, number: Tensor, kept: Tensor) -> Tensor:
    """[H, n + 1] whose element i is the mass of the first i kept entries."""
    sums = mass.new_zeros(mass.shape[0], mass.shape[1] + 1)
    return sums.scatter_add(1, number * kept, mass * kept).cumsum(dim=1)


def uniform_draws(view: LayerView) -> Tensor:
    """[H, n] numbers in [0, 1) that depend on layer, head and index alone (splitmix64's mixing)."""
    head = torch.arange(view.num_heads, device=view.device)[:, None] % view.heads_per_request
    index = torch.arange(view.num_entries, device=view.device)
    bits = (view.layer * 1_000_003 + head) * 4_294_967_311 + index + 1
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = (bits ^ ((bits >> 31) & ((1 << 33) - 1))) & ((1 << 52) - 1)
    return bits.double() / (1 << 52)
