"""Spans: what the text goes on with, what the question points at, and what stands out by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.pooling import max_or_mean_pool, max_within
from vllm_kvcompress.kernels.top_entries import ranks
from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.leverage import Leverage, key_space, leverage
from vllm_kvcompress.policies.parts.mass import (
    check_kernel_size,
    left_of_window,
    observed_masses,
    stride_of_sums,
)


@dataclass(frozen=True)
class Spans(Policy):
    """The highest of three ranks: by many queries' attention, by few queries', and by the key.

    Many queries (H2O's sum) say what text goes on with, and miss what only the question asks for;
    every other one of them says as much as all, in half of the time (`stride`).
    The last few (SnapKV's window) point at the first token of an answer, of which narrow pooling
    would keep a part: the whole passage around it stays. Where the question is still to come,
    neither knows of it; a key that no others could stand for (leverage) may be what it asks for.
    These have no common scale, so each is replaced by its rank in the head: a token stays if one
    of them puts it high. Heads get the same budget, since ranks are alike in all.
    """

    name = "spans"
    batches = True
    paper = (
        "of this project; from H2O, arXiv 2306.14048, SnapKV, arXiv 2404.14469, and Compactor, "
        "arXiv 2507.08143"
    )
    summary = (
        "What the last 256 queries attend to, and passages around what the last 32 do, or around "
        "keys that no others could stand for."
    )
    stages = Stages(
        score="the highest of three ranks in the head: by the mean attention of one in stride of "
        "the last window_size queries; by that of the last near_size, the highest of num_after "
        "tokens before to num_before behind; by the key's leverage, max-pooled over "
        "key_kernel_size",
        protect="the first num_sinks tokens, and the last near_size",
        allocate="the same for every layer and head",
        select="highest score",
    )

    window_size: int = parameter(256, "last queries observed", minimum=1)
    near_size: int = parameter(32, "last queries that also count alone, and are kept", minimum=1)
    num_after: int = parameter(15, "tokens that are kept behind one they look at", minimum=0)
    num_before: int = parameter(15, "tokens that are kept before it", minimum=0)
    key_kernel_size: int = parameter(7, "width of the leverage's pooling; odd", minimum=1)
    num_sinks: int = parameter(4, "first tokens that are kept", minimum=0)
    keys: str = key_space()
    stride: int = stride_of_sums()

    def __post_init__(self) -> None:
        check_kernel_size(self.key_kernel_size, "key_kernel_size")
        if self.near_size > self.window_size:
            raise ConfigError(
                f"near_size: expected at most window_size, {self.window_size}, found "
                f"{self.near_size}; the last queries are a part of those that are observed."
            )

    @property
    def needs(self) -> Needs:
        """The last queries, and what the keys' leverage needs."""
        return replace(Leverage(self.keys).needs, window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        """The first few tokens and the last.

        The first rank high by themselves, but a short prompt may have room for no more than what
        is protected.
        """
        return Protection(num_sinks=self.num_sinks, num_recent=self.near_size)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 ranks from 0 to n - 1."""
        last = replace(view, queries=view.queries[-self.near_size :])
        reach = partial(max_within, num_after=self.num_after, num_before=self.num_before)
        windows = (self.window_size, self.stride), (self.near_size, 1)
        mass, pointed_at = observed_masses(view, *windows)
        near = left_of_window(last, pointed_at, reach, float("-inf"))
        alone = max_or_mean_pool(leverage(view, self.keys), self.key_kernel_size, "max")
        scores = torch.stack([mass, near, alone])
        places = ranks(scores.flatten(0, 1), view.valid.repeat(len(scores), 1))
        return places.view_as(scores).amax(dim=0)
