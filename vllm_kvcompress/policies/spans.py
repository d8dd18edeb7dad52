"""Spans, of this project; from H2O, arXiv 2306.14048, SnapKV, arXiv 2404.14469, and Compactor,
arXiv 2507.08143."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.pooling import max_or_mean_pool, max_within
from vllm_kvcompress.kernels.top_entries import ranks
from vllm_kvcompress.policies import LayerView, Needs, Policy, Protection, Stages, parameter
from vllm_kvcompress.policies.leverage import KEY_SPACE, Leverage, leverage
from vllm_kvcompress.policies.parts.mass import (
    STRIDE,
    check_kernel_size,
    left_of_window,
    observed_masses,
)


@dataclass(frozen=True)
class HighestRank(Policy):
    """What `spans` and `keyspans` have in common: a token's score is the highest of three ranks.

    Attributes:
        key_weight: the distance of a key's rank from the top is divided by it, so with 3, where the
            best ten by either attention are kept, so are the best thirty by their keys.
    """

    window_size: int = parameter(256, "last queries observed", minimum=1)
    near_size: int = parameter(
        32, "last queries that also count separately, and are kept", minimum=1
    )
    num_after: int = parameter(15, "tokens that are kept after one that these attend to", minimum=0)
    num_before: int = parameter(15, "tokens that are kept before it", minimum=0)
    num_sinks: int = parameter(4, "first tokens that are kept", minimum=0)
    stride: int = STRIDE
    key_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.near_size > self.window_size:
            raise ConfigError(
                f"near_size: expected at most window_size, {self.window_size}, found "
                f"{self.near_size}; give a larger window_size or a smaller near_size."
            )

    @abstractmethod
    def key_scores(self, view: LayerView) -> Tensor:
        """[H, n] fp32, higher for keys that the head's others do not stand for."""

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 highest rank of each token, from 0 to n."""
        last = replace(view, queries=view.queries[-self.near_size :])
        reach = partial(max_within, num_after=self.num_after, num_before=self.num_before)
        windows = (self.window_size, self.stride), (self.near_size, 1)
        many, few = observed_masses(view, *windows)
        few = left_of_window(last, few, reach, float("-inf"))
        scores = torch.stack([many, few, self.key_scores(view)])
        by_rank = ranks(scores.flatten(0, 1), view.valid.repeat(len(scores), 1)).view_as(scores)
        from_top = view.lengths[:, None] - by_rank[2]
        by_rank[2] += from_top - from_top / self.key_weight
        return by_rank.amax(dim=0)


@dataclass(frozen=True)
class Spans(HighestRank):
    """Keeps what many queries attend to, passages that the last ones do, and unusual keys.

    The attention of many queries (H2O's sum) finds what the text builds on, but not what only the
    question asks for; every second query is as good as all, in half of the time (`stride`).
    The last few (SnapKV's window) attend to the first token of an answer, so the passage around it
    is kept, of which narrow pooling would keep a part. Neither knows of a question that is still to
    come; it may ask for a key that others cannot replace (leverage).
    The three have no common scale, so each is replaced by its rank in the head: a token is kept if
    one of the ranks is high. Heads get the same budget, since ranks are alike in all.
    """

    name = "spans"
    batches = True
    stages = Stages(
        score="the highest of three ranks in the head: by the mean attention of every stride-th of "
        "the last window_size queries; by that of the last near_size, max-pooled from num_after "
        "tokens before to num_before after; by the key's leverage, max-pooled over key_kernel_size",
        protect="the first num_sinks tokens, and the last near_size",
        allocate="the same for every layer and head",
        select="highest score",
    )

    key_kernel_size: int = parameter(7, "width of the leverage's pooling; odd", minimum=1)
    keys: str = KEY_SPACE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel_size(self.key_kernel_size, "key_kernel_size")

    @property
    def needs(self) -> Needs:
        return replace(Leverage(self.keys).needs, window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        """The first tokens and the last.

        The first rank high anyway, but a short prompt may have room for protected tokens only.
        """
        return Protection(num_sinks=self.num_sinks, num_recent=self.near_size)

    def key_scores(self, view: LayerView) -> Tensor:
        """[H, n] fp32 leverage of the keys, pooled."""
        return max_or_mean_pool(leverage(view, self.keys), self.key_kernel_size, "max")
