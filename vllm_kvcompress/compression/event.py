"""A compression event of one request, and the weights of a layer that value-aware policies read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm_kvcompress.compression.stopwatch import Stopwatch
from vllm_kvcompress.kernels.alibi import Alibi
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.scheduling.plan import EventPlan, num_in_spans
from vllm_kvcompress.scheduling.rule import num_kept_of_spans


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer that policies read; None where the policy does not ask.

    Attributes:
        output_weight: [num_heads, head_size, group, hidden] o_proj by KV head and its group.
        output_root: [num_query_heads, head_size, head_size] L with L L^T = W W^T by query head;
            fewer columns where values are projected before (MLA).
        rotary: the rotary embedding of the keys.
        sinks: [num_heads, group] logits that take attention without a token; None: the model has
            none.
        alibi: biases of attention by distance; None: the model has none.
    """

    output_weight: Tensor | None = None
    output_root: Tensor | None = None
    rotary: Rotary | None = None
    sinks: Tensor | None = None
    alibi: Alibi | None = None

    def joined(self, other: LayerWeights, num_kv_heads: int) -> LayerWeights:
        """Returns the weights of a layer whose KV heads serve another's query heads as well.

        The group of each of its `num_kv_heads` becomes longer by the other layer's.
        """
        layers = self, other
        weights = [each.output_weight for each in layers if each.output_weight is not None]
        roots = [
            each.output_root.unflatten(0, (num_kv_heads, -1))
            for each in layers
            if each.output_root is not None
        ]
        sinks = [each.sinks for each in layers if each.sinks is not None]
        return replace(
            self,
            output_weight=torch.cat(weights, dim=2) if weights else None,
            output_root=torch.cat(roots, dim=1).flatten(0, 1) if roots else None,
            sinks=torch.cat(sinks, dim=1) if sinks else None,
        )

    def rotates_like(self, other: LayerWeights) -> bool:
        """Returns whether both layers rotate keys alike."""
        a, b = self.rotary, other.rotary
        if a is None or b is None:
            return a is b
        alike = a.halves == b.halves and a.first == b.first
        return alike and torch.equal(a.frequencies, b.frequencies)


@dataclass
class Event:
    """One event of one request, while its step runs.

    Attributes:
        plan: the scheduler's plan.
        slot: the request's row in the page tables.
        pipeline: the request's policy.
        blocks: [end_block - first_block (+ 1 if a partial block follows)] int64 block ids.
        fresh_pages: [K * num_layers * num_heads] int64 pages that take the kept tokens; in place
            those that each layer has already.
        layer_pages: pages for tokens in each layer after the event.
        state_pages: pages for policy state in each layer.
        layer_starts: index in `fresh_pages` where each layer's pages begin.
        stopwatch: time spent; events of a batch share its time equally.
        num_body: pages of the longest head before the event; on accelerators an upper bound.
        num_tail: tokens of the partial block.
        max_kept: pages of the longest head so far; on accelerators an upper bound.
        page_counts: [num_heads] int64 kept pages of every layer so far.
        error: why the policy failed and the fallback runs instead; None: it did not fail.
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
    state_pages: list[int]
    layer_starts: list[int]
    max_kept: int = 0
    page_counts: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    def fall_back(self, pipeline: Pipeline, error: Exception) -> None:
        """Lets another policy, which observes and merges nothing, decide from this layer on."""
        protected = self.plan.protected if self.pipeline.keeps_spans_whole else ()
        former, self.error = self.pipeline, error
        self.pipeline = pipeline.for_model(
            attends_by_position=former.attends_by_position, num_near=former.num_near
        )
        self.plan = replace(self.plan, window_size=0, protected=protected)

    def kept_pages(self, layer: int) -> Tensor:
        """Returns the [P] int64 pages that take the kept tokens of a layer."""
        start = self.layer_starts[layer]
        return self.fresh_pages[start : start + self.layer_pages[layer]]

    @property
    def num_full(self) -> int:
        """Number of full blocks of the tail."""
        return self.plan.end_block - self.plan.first_block

    @property
    def num_tokens(self) -> int:
        """Upper bound on the tokens that the event reads of one head."""
        return self.num_body * (self.plan.position // self.plan.end_block)


def num_protected(pipeline: Pipeline, plan: EventPlan, block_size: int) -> int:
    """Counts the tokens of full blocks that every head keeps since the request protects them."""
    in_spans = num_in_spans(plan.protected, plan.end_block * block_size)
    return num_kept_of_spans(pipeline.span_share, in_spans)
