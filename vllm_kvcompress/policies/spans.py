"""Spans: what the text goes on with, and whole passages around what the question points at."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.parts.mass import (
    check_kernel_size,
    observed_mass,
    pool_left_of_window,
)


@dataclass(frozen=True)
class Spans(Policy):
    """The higher of two ranks: by many queries' attention, and by few queries' in wide pools.

    Many queries (H2O's sum) say what text goes on with, and miss what only the question asks for;
    the last few (SnapKV's window) point at the first token of an answer, and narrow pooling then
    keeps a part of it. Their masses have no common scale, so each is replaced by its rank in the
    head: a token stays if either puts it high. Max-pooling as wide as a phrase keeps passages
    whole. Heads get the same budget, since ranks are alike in all.
    """

    name = "spans"
    paper = "of this project; from H2O, arXiv 2306.14048, and SnapKV, arXiv 2404.14469"
    summary = "What the last 256 queries attend to, and passages around what the last 32 do."
    stages = Stages(
        score="the higher of two ranks in the head: by the mean attention of the last window_size "
        "queries; by that of the last near_size, max-pooled over kernel_size tokens",
        protect="the last near_size tokens",
        allocate="the same for every layer and head",
        select="highest score",
    )

    window_size: int = parameter(256, "last queries observed", minimum=1)
    near_size: int = parameter(32, "last queries that also count alone, and are kept", minimum=1)
    kernel_size: int = parameter(31, "width of their pooling over neighbours; odd", minimum=1)

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)
        if self.near_size > self.window_size:
            raise ConfigError(
                f"near_size: expected at most window_size, {self.window_size}, found "
                f"{self.near_size}; the last queries are a part of those that are observed."
            )

    @property
    def needs(self) -> Needs:
        """The last queries."""
        return Needs(window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        """The last few tokens."""
        return Protection(num_recent=self.near_size)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 ranks from 0 to n - 1."""
        last = replace(view, queries=view.queries[-self.near_size :])
        near = pool_left_of_window(last, observed_mass(last), self.kernel_size, "max")
        return torch.maximum(ranks(view, observed_mass(view)), ranks(view, near))


def ranks(view: LayerView, scores: Tensor) -> Tensor:
    """[H, n] fp32 how many entries of the head score lower; of equals, the later is higher."""
    order = scores.masked_fill(~view.valid, float("inf")).argsort(dim=1, stable=True)
    nth = torch.arange(view.num_entries, dtype=torch.float32, device=view.device)
    return torch.empty_like(scores).scatter_(1, order, nth.expand_as(scores))
