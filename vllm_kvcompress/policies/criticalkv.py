"""CriticalKV (arXiv 2502.03805): tokens without which outputs would change most."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.kernels.value_norms import value_norms_l1, value_norms_l2
from vllm_kvcompress.policies import (
    LayerView,
    Modifier,
    Needs,
    Pipeline,
    Protection,
    Selector,
    Stages,
    parameter,
)


@dataclass(frozen=True)
class CriticalKV(Modifier, Selector):
    """Value-aware selection inside each head (Algorithm 1).

    A share alpha of the head's budget goes to the tokens of highest mass S; the rest to those
    of highest (S + epsilon) * nu, where nu is the norm of the value projected through W_O.
    Budgets exclude protected tokens; S is a mean over the window, so epsilon is absolute.
    """

    name = "criticalkv"
    paper = (
        "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, "
        "arXiv 2502.03805"
    )
    summary = "Half of each head's budget by score, half by score times the value's projected norm."
    stages = Stages(select="two stages: highest score, then (score + epsilon) * ||v W_O||")
    goes_on = ("snapkv", "adakv", "headkv", "pyramidkv", "h2o")
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
    norm: str = parameter("l1", "l1 (exact, reads W_O) or l2 (Gram matrix)", choices=("l1", "l2"))

    def modify(self, base: Pipeline) -> Pipeline:
        return replace(base, selector=self)

    @property
    def needs(self) -> Needs:
        return Needs(output_weight=self.norm == "l1", output_gram=self.norm == "l2")

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        valid = view.valid
        protected = protection.mask(view, kept)
        num_protected = protected.sum(dim=1)
        budget = (kept - num_protected).clamp_min(0)
        first_stage = num_protected + (budget * self.alpha).floor().to(torch.int64)
        sure = scores.masked_fill(protected, float("inf"))
        chosen = top_entries(sure, valid, torch.minimum(first_stage, kept))
        weighted = (scores + self.epsilon) * self._value_norms(view, valid & ~chosen)
        return top_entries(weighted.masked_fill(chosen, float("inf")), valid, kept)

    def _value_norms(self, view: LayerView, wanted: Tensor) -> Tensor:
        if self.norm == "l1":
            assert view.output_weight is not None
            return value_norms_l1(view.kv, view.output_weight, wanted)
        assert view.output_gram is not None
        return value_norms_l2(view.kv, view.output_gram)
