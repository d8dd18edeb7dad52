"""CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective,
arXiv 2502.03805."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.kernels.value_norms import value_norms_l1, value_norms_l2
from vllm_kvcompress.policies import Modifier, Pipeline, Protection, Selector, Stages, parameter
from vllm_kvcompress.policies.base import LayerView, Needs, Scorer
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.parts.parameters import switch


@dataclass(frozen=True)
class CriticalKV(Modifier, Selector):
    """Half of each head's budget by score, half by score times the value's projected norm.

    A share alpha of the head's budget goes to the tokens of highest mass S; the rest to those
    of highest (S + epsilon) * nu, where nu is the norm of the value projected through W_O.
    Budgets exclude protected tokens; S is a mean over the window, so epsilon is absolute. The
    norm is L2 by default, which needs no projection of every value and keeps as good tokens as the
    paper's L1 (docs/results/language.md).

    Over the query heads that share a KV head both factors are averaged (`product`), or their
    products are (`exact`). The second stage lowers a bound on the output's error only where the
    tokens of the first hold more than half of the attention (the paper's sigma); with `guard`
    heads where they do not are selected by the score alone.

    Attributes:
        scorer: scorer of the policy underneath.
    """

    name = "criticalkv"
    batches = True
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
    norm: str = parameter(
        "l2", "l2 (from a Gram matrix) or l1 (the paper's, reads W_O)", choices=("l1", "l2")
    )
    weights: str = parameter(
        "product",
        "mean score times mean norm of a group's query heads, or the mean of products (exact)",
        choices=("product", "exact"),
    )
    guard: str = switch("on: by score alone in heads where the first stage is unsure")
    scorer: Scorer | None = None

    def modify(self, base: Pipeline) -> Pipeline:
        """Replaces the selector.

        Raises:
            ConfigError: exact weights of accumulated attention, which is a mean over the group.
        """
        if self.weights == "exact" and base.needs.accumulated:
            raise ConfigError(
                f"weights: expected product with {base.name}, whose attention is added up as the "
                "mean of a group's query heads, found exact; leave it out."
            )
        return replace(base, selector=replace(self, scorer=base.scorer))

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
        by_score = scores.masked_fill(protected, float("inf"))
        chosen = top_entries(by_score, valid, torch.minimum(first_stage, kept))
        weighted = self._weighted(view, scores, valid & ~chosen)
        if self.guard == "on":
            rest = observed_mass(view).masked_fill(chosen | ~valid, 0)
            weighted = torch.where(rest.sum(dim=1, keepdim=True) >= 0.5, scores, weighted)
        return top_entries(weighted.masked_fill(chosen, float("inf")), valid, kept)

    def _weighted(self, view: LayerView, scores: Tensor, wanted: Tensor) -> Tensor:
        """[H, n] fp32 (score + epsilon) times the value's norm."""
        if self.weights == "product":
            return (scores + self.epsilon) * self._value_norms(view, wanted)
        assert self.scorer is not None
        group = view.queries.shape[1] // view.num_heads
        weighted = torch.zeros_like(scores)
        for member in range(group):
            weight, gram = view.output_weight, view.output_gram
            one_head = replace(
                view,
                queries=view.queries[:, member::group],
                output_weight=None if weight is None else weight[:, :, member : member + 1],
                output_gram=None if gram is None else gram[member::group].contiguous(),
            )
            score = self.scorer.score(one_head) + self.epsilon
            weighted += score * self._value_norms(one_head, wanted) / group
        return weighted

    def _value_norms(self, view: LayerView, wanted: Tensor) -> Tensor:
        if self.norm == "l1":
            assert view.output_weight is not None
            return value_norms_l1(view.kv, view.output_weight, wanted)
        assert view.output_gram is not None
        gram = view.output_gram.unflatten(0, (len(view.layers) * view.heads_per_request, -1))
        if self.weights == "exact":  # of one query head of each group
            return value_norms_l2(view.kv, gram)
        return view.kv.projected_norms(partial(value_norms_l2, output_gram=gram))
