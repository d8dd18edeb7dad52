"""Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies import Allocator, Modifier, Pipeline, Protection, Stages, parameter
from vllm_kvcompress.policies.base import LayerView, ModelHeads
from vllm_kvcompress.policies.keydiff import KeyDiff
from vllm_kvcompress.policies.parts.allocation import UNIFORM, divide
from vllm_kvcompress.policies.parts.parameters import switch
from vllm_kvcompress.policies.parts.selection import NOTHING_PROTECTED
from vllm_kvcompress.policies.snapkv import SnapKV

PHI = parameter(0.2, "part of the budget shared out evenly", 0.0, 1.0)
PHI_MODE = parameter(
    "blend", "blend (the authors' code) or floor (kvpress)", choices=("blend", "floor")
)
NORMALIZE = switch("on: multiply a head's scores by the share of its highest ones in their sum")


@dataclass(frozen=True)
class Ada(Modifier, Allocator):
    """Budgets per head on top of another policy's scores and layers.

    With c the mean selectable budget of a head and m_h its tokens among the layer's top H*c:
    `blend` gives (1 - phi) * m_h + phi * c, `floor` first gives every head its best phi * c.
    With `normalize` a head's scores are first multiplied by the share of its c highest in their sum
    (an option of the authors' code).

    Attributes:
        safeguard: phi.
        protection: tokens that do not compete.
        layers: divides the budget among the layers.
    """

    name = "adakv"
    batches = True
    any_order = True
    stages = Stages(
        allocate="layers as the policy has it; heads by their share of the layer's highest scores"
    )
    goes_on = ("pyramidkv", "h2o", "keydiff")

    safeguard: float = PHI
    safeguard_mode: str = PHI_MODE
    normalize: str = NORMALIZE
    any_scores: str = switch("on: also compares heads by scores that are no attention mass")
    protection: Protection = NOTHING_PROTECTED
    layers: Allocator = UNIFORM

    def modify(self, base: Pipeline) -> Pipeline:
        """Replaces the allocator, and keeps the former one for the budgets of layers.

        Raises:
            ConfigError: the policy's scores are no attention mass.
        """
        if isinstance(base.scorer, KeyDiff) and self.any_scores == "off":
            raise ConfigError(
                "adakv divides a layer's budget by each head's attention mass, which keydiff does "
                "not score; leave adakv out, or compare cosines instead, with any_scores=on."
            )
        allocator = replace(self, layers=base.allocator).beside(base.protection)
        return replace(base, allocator=allocator)

    def beside(self, protection: Protection) -> Self:
        return replace(self, protection=protection)

    @property
    def layer_dependent(self) -> bool:
        return self.layers.layer_dependent

    def bind(self, model: ModelHeads) -> Self:
        return replace(self, layers=self.layers.bind(model))

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        return self.layers.layer_pages(num_blocks, capacity, num_heads, num_logical_blocks)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        num_heads, total_tokens = view.heads_per_request, total * view.block_size
        mean = view.for_heads(total_tokens // num_heads)
        protected = self.protection.mask(view, view.lengths.minimum(mean))
        competing = view.valid & ~protected
        num_protected = protected.sum(dim=1)
        selectable = (total_tokens - view.by_request(num_protected).sum(dim=1)).clamp_min(0)
        share = view.for_heads(selectable / num_heads)
        if self.normalize == "on":
            best = top_entries(scores, competing, share.floor().to(torch.int64))
            top, all_of = (scores.masked_fill(~some, 0).sum(dim=1) for some in (best, competing))
            scores = scores * (top / all_of.clamp_min(1e-30))[:, None]
        candidates = scores.masked_fill(protected, float("-inf"))
        if self.safeguard_mode == "floor":
            fewest = (self.safeguard * share).floor().to(torch.int64)
            best = top_entries(candidates, competing, fewest)
            candidates = candidates.masked_fill(best, float("inf"))
        candidates, competing = (
            view.by_request(rows).flatten(1) for rows in (candidates, competing)
        )
        won = top_entries(candidates, competing, selectable).view_as(scores)
        won_per_head = won.sum(dim=1).float()
        if self.safeguard_mode == "blend":
            won_per_head = (1 - self.safeguard) * won_per_head + self.safeguard * share
        return divide(view, won_per_head + num_protected, total, floor)


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV with budgets per head: heads that spread their attention keep more."""

    name = "adakv"
    batches = True
    stages = SnapKV.stages._replace(allocate="by each head's share of the layer's highest scores")
    decides = ("how much each head keeps",)
    refuses = dict.fromkeys(
        ("knorm", "streamingllm", "tova"),
        "adakv divides a layer's budget by each head's attention mass, which {} does not score",
    )

    safeguard: float = PHI
    safeguard_mode: str = PHI_MODE
    normalize: str = NORMALIZE

    @property
    def allocator(self) -> Ada:
        """Budgets by scores; the window does not compete."""
        return Ada(self.safeguard, self.safeguard_mode, self.normalize, protection=self.protection)
