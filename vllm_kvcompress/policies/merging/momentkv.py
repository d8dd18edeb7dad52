"""MomentKV: Closing the Directional Gap in KV Cache Eviction for Long-Context Inference,
arXiv 2606.01563."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.merging.moments import (
    add_to_moments,
    moment_residuals,
    moment_size,
    pack_moments,
    packed_size,
    unpack_moments,
)
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import Modifier, Pipeline, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.adakv import PHI, PHI_MODE, Ada
from vllm_kvcompress.policies.base import LayerView, Merged, Merger, Needs
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.parts.parameters import switch
from vllm_kvcompress.rounding import ceil_div

MERGE = "evicted keys and values go into moments, kept in the request's own blocks"
CORRECT = "every later attention output, from the moments"


ORDER = parameter(1, "1: means and cross moments of evicted keys and values; 0: means alone", 0, 1)
STATE_ROOM = parameter(
    "within", "moments count within the budget, or on_top of it", choices=("within", "on_top")
)


class Moments(Merger):
    """Adds evicted tokens to the policy state from which attention outputs are corrected.

    Attributes:
        order: 1, or 0 (no cross moments, so that the estimate is the mean value).
        state_room: within the budget, or on_top of it.
    """

    order: int
    state_room: str

    @property
    def needs(self) -> Needs:
        return Needs(values=True, plain_logits=True)

    @property
    def corrects(self) -> bool:
        return True

    @property
    def state_on_top(self) -> bool:
        return self.state_room == "on_top"

    def state_size(self, head_size: int) -> int:
        """Size of n_e, the mean key and value, and cross moments in 16 bits (App. C.2)."""
        return packed_size(head_size, self.order)

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """Adds evicted entries to the moments; kept ones are unchanged."""
        state = add_to_moments(view.kv, state_of(view), view.valid & ~kept)
        return Merged(state=pack_moments(state, view.kv.head_size, self.order))


@dataclass(frozen=True)
class MomentKV(Moments, Policy):
    """AdaKV that keeps what moments of evicted tokens do not predict, and corrects attention.

    r_j = v_j - mean v - (scale / n_e) X k_j (Eq. 10), or v_j where nothing was evicted yet: with
    one event and one round, every r is the value itself. Scores are averaged over aligned chunks of
    tokens. In several rounds an event evicts equal parts, with moments of the parts before.
    """

    name = "momentkv"
    batches = True
    stages = Stages(
        score="mean attention of the last window_size queries",
        protect="the first num_sinks and the last window_size tokens",
        allocate="by each head's share of the layer's highest scores",
        select="highest score times the residual of the value, by chunks",
        merge=MERGE,
        correct=CORRECT,
    )

    window_size: int = parameter(32, "last queries observed, and kept", minimum=1)
    num_sinks: int = parameter(1, "first tokens kept", minimum=0)
    chunk_size: int = parameter(4, "neighbouring tokens that share a score", minimum=1)
    safeguard: float = PHI
    safeguard_mode: str = PHI_MODE
    rounds: int = parameter(1, "parts in which an event evicts, with moments updated after each", 1)
    order: int = ORDER
    correct: str = switch("off: attention is not corrected", "on")
    state_room: str = STATE_ROOM

    @property
    def corrects(self) -> bool:
        return self.correct == "on"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        return Protection(num_sinks=self.num_sinks, num_recent=self.window_size)

    @property
    def allocator(self) -> Ada:
        return Ada(self.safeguard, self.safeguard_mode, protection=self.protection)

    def score(self, view: LayerView) -> Tensor:
        return observed_mass(view)

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        protected, state, left = protection.mask(view, kept), state_of(view), view.valid
        excess = (view.lengths - kept).clamp_min(0)
        for part in range(1, self.rounds + 1):
            unpredicted = moment_residuals(view.kv, state, view.scale)
            weighted = chunk_means(scores * unpredicted, left, self.chunk_size)
            num_evicted = torch.div(excess * part, self.rounds, rounding_mode="floor")
            first = weighted.masked_fill(protected, float("inf"))
            staying = top_entries(first, left, view.lengths - num_evicted)
            if part < self.rounds:
                state = add_to_moments(view.kv, state, left & ~staying)
            left = staying
        return left


@dataclass(frozen=True)
class MomentFix(Modifier, Moments):
    """Corrects attention with the moments of what another policy evicts."""

    name = "momentfix"
    batches = True
    stages = Stages(merge=MERGE, correct=CORRECT)

    order: int = ORDER
    state_room: str = STATE_ROOM

    @classmethod
    def fits(cls, policy: type[Policy]) -> bool:
        """Fits every policy that does not merge evicted tokens itself."""
        return not policy.stages.merge

    def modify(self, base: Pipeline) -> Pipeline:
        return replace(base, merger=self)


def state_of(view: LayerView) -> Tensor:
    """Moments after the former event; zeros at a first event."""
    if view.state is not None:
        return unpack_moments(view.state, view.kv.head_size)
    size = moment_size(view.kv.head_size)
    return torch.zeros(view.num_heads, size, device=view.device)


def chunk_means(scores: Tensor, valid: Tensor, chunk_size: int) -> Tensor:
    """[H, n] mean score of the valid entries in each entry's aligned chunk."""
    num_heads, num_entries = scores.shape
    chunk = torch.arange(num_entries, device=scores.device) // chunk_size
    index = chunk.expand(num_heads, -1)
    num_chunks = ceil_div(num_entries, chunk_size)
    sums = scores.new_zeros(num_heads, num_chunks)
    sums = sums.scatter_add(1, index, scores.masked_fill(~valid, 0))
    counts = torch.zeros_like(sums).scatter_add(1, index, valid.to(scores.dtype))
    return (sums / counts.clamp_min(1)).gather(1, index)
