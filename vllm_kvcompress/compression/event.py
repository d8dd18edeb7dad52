"""A compression event of one request, and the weights of a layer that value-aware policies read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm_kvcompress.compression.stopwatch import Stopwatch
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.scheduling.plan import EventPlan


@dataclass(frozen=True)
class LayerWeights:
    """What value-aware policies need of one layer (None where the pipeline does not ask).

    Attributes:
        output_weight: [num_heads, head_size, group, hidden] o_proj by KV head and its group.
        output_gram: [num_query_heads, head_size, head_size] fp32 W W^T by query head.
        rotary: how keys are rotated.
    """

    output_weight: Tensor | None = None
    output_gram: Tensor | None = None
    rotary: Rotary | None = None

    def rotates_as(self, other: LayerWeights) -> bool:
        """Whether keys are rotated as in another layer, as far as policies ask."""
        mine, theirs = self.rotary, other.rotary
        if mine is None or theirs is None:
            return mine is theirs
        return mine.halves == theirs.halves and torch.equal(mine.frequencies, theirs.frequencies)


@dataclass
class Event:
    """One event of one request, while its step runs.

    Attributes:
        plan: what the scheduler decided.
        slot: the request's row in the page tables.
        pipeline: the request's policy.
        blocks: [end_block - first_block (+ 1 if a partial block follows)] int64 block ids.
        fresh_pages: [K * num_layers * num_heads] int64 pages that take the kept tokens.
        layer_pages: pages of each layer afterwards, the state's not counted.
        state_pages: pages of each layer for the policy state.
        layer_starts: where each layer's pages begin in `fresh_pages`.
        stopwatch: counts the time spent; with others in a batch an equal part of it.
        num_body: pages that its longest head may have before it; an upper bound off the CPU.
        num_tail: tokens of the partial block.
        max_kept: pages of the longest head so far; off the CPU an upper bound.
        page_counts: [num_heads] int64 of every layer so far.
        error: why the policy failed, and another one has taken its place; None: it did not.
    """

    plan: EventPlan
    slot: int
    pipeline: Pipeline
    blocks: Tensor
    fresh_pages: Tensor
    layer_pages: list[int]
    stopwatch: Stopwatch
    num_body: int
    num_tail: int
    state_pages: int = 0
    layer_starts: list[int] = field(default_factory=list)
    max_kept: int = 0
    page_counts: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    def fall_back(self, pipeline: Pipeline, error: Exception) -> None:
        """From this layer on another policy decides, which observes nothing and merges nothing."""
        self.pipeline, self.error = pipeline, error
        self.plan = replace(self.plan, window_size=0)

    def kept_pages(self, layer: int) -> Tensor:
        """[P] int64 pages that take the kept tokens of a layer."""
        start = self.layer_starts[layer]
        return self.fresh_pages[start : start + self.layer_pages[layer]]

    @property
    def num_full(self) -> int:
        """Full blocks that the event reads as they were written."""
        return self.plan.end_block - self.plan.first_block

    @property
    def num_tokens(self) -> int:
        """Most tokens of a head that the event reads."""
        return self.num_body * (self.plan.position // self.plan.end_block)

    @property
    def seconds(self) -> float | None:
        """Time spent so far; None while a device still works."""
        return self.stopwatch.seconds
