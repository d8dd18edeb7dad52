"""CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective,
arXiv 2502.03805."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.kernels.value_norms import value_norms_l1, value_norms_l2
from vllm_kvcompress.policies import Modifier, Pipeline, Protection, Selector, Stages, parameter
from vllm_kvcompress.policies.base import LayerView, Needs


@dataclass(frozen=True)
class CriticalKV(Modifier, Selector):
    """Half of each head's budget by score, half by score times the value's projected norm.

    A share alpha of the head's budget goes to the tokens of highest mass S; the rest to those
    of highest (S + epsilon) * nu, where nu is the norm of the value projected through W_O.
    Budgets exclude protected tokens; S is a mean over the window, so epsilon is absolute. The
    norm is L2 by default, which needs no projection of every value and keeps as good tokens as the
    paper's L1 (docs/results/language.md).

    Over the query heads that share a KV head both factors are averaged. The second stage lowers a
    bound on the output's error only where the tokens of the first hold more than half of the
    attention (the paper's sigma).
    """

    name = "criticalkv"
    batches = True
    stages = Stages(select="two stages: highest score, then (score + epsilon) * ||v W_O||")
    goes_on = ("snapkv", "adakv", "headkv", "pyramidkv", "h2o", "attention")
    refuses = dict(  # noqa: RUF012
        tova="criticalkv chooses inside each head, and {} keeps the same entries in all heads",
        momentkv="{} already weighs attention with values",
        obcache="{} and criticalkv both weigh attention with values",
    )
    otherwise = (
        "criticalkv weighs attention mass with value norms, and the scores of {} are no attention "
        "mass per head"
    )

    alpha: float = parameter(0.5, "part of the budget chosen by score alone", 0.0, 1.0)
    epsilon: float = parameter(1e-4, "added to the score in the second stage", 0.0)
    norm: str = parameter(
        "l2", "l2 (from a root of W_O W_O^T) or l1 (the paper's, reads W_O)", choices=("l1", "l2")
    )

    def modify(self, base: Pipeline) -> Pipeline:
        return replace(base, selector=self)

    @property
    def needs(self) -> Needs:
        return Needs(output_weight=self.norm == "l1", output_root=self.norm == "l2")

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        valid = view.valid
        protected = protection.mask(view, kept)
        num_protected = protected.sum(dim=1)
        budget = (kept - num_protected).clamp_min(0)
        first_stage = num_protected + (budget * self.alpha).floor().to(torch.int64)
        by_score = scores.masked_fill(protected, float("inf"))
        chosen = top_entries(by_score, valid, torch.minimum(first_stage, kept))
        weighted = (scores + self.epsilon) * self._value_norms(view, valid & ~chosen)
        return top_entries(weighted.masked_fill(chosen, float("inf")), valid, kept)

    def _value_norms(self, view: LayerView, wanted: Tensor) -> Tensor:
        if self.norm == "l1":
            assert view.output_weight is not None
            return value_norms_l1(view.kv, view.output_weight, wanted)
        assert view.output_root is not None
        layers = len(view.layers)
        roots = view.output_root.unflatten(0, (layers * view.heads_per_request, -1))
        compute = partial(value_norms_l2, output_root=roots, num_layers=layers)
        return view.kv.projected_norms(compute)
