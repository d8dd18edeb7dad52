"""Key spans, of this project; from H2O, arXiv 2306.14048, SnapKV, arXiv 2404.14469, and KeyDiff,
arXiv 2504.15364."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.policies import LayerView, Needs, Protection, Stages, parameter
from vllm_kvcompress.policies.keydiff import KeyDiff
from vllm_kvcompress.policies.parts.mass import observed_mass
from vllm_kvcompress.policies.spans import HighestRank


@dataclass(frozen=True)
class KeySpans(HighestRank):
    """Keeps unusual keys in heads with room for them, and what is attended to in all others.

    Where a tenth is kept, facts that nobody has asked for yet are lost first. With measured heads a
    few heads keep most of a prompt: they rank tokens as `spans` does, but keep three times as many
    by their keys as by either attention, and rank keys by how little they are like the mean key
    (KeyDiff). Heads with little room find no facts; text that goes on needs what they attend to.
    """

    name = "keyspans"
    batches = True
    stages = Stages(
        score="as spans, with the rank by KeyDiff in place of the pooled leverage; its distance "
        "from the top counts 1/key_weight",
        protect="the first num_sinks tokens, and the last num_recent",
        allocate="the same for every layer and head",
        select="highest score; in heads that keep less than min_kept of their tokens, highest mean "
        "attention of the last near_size queries",
    )

    near_size: int = parameter(32, "last queries that also count separately", minimum=1)
    num_recent: int = parameter(16, "last tokens that are kept", minimum=0)
    key_weight: float = parameter(
        3.0, "how many times as many tokens are kept by their keys as by either attention", 1.0
    )
    min_kept: float = parameter(
        0.2, "heads that keep less of their tokens keep those attended to alone", 0.0, 1.0
    )

    @property
    def needs(self) -> Needs:
        return replace(KeyDiff().needs, window_size=self.window_size)

    @property
    def protection(self) -> Protection:
        """The first tokens and the last."""
        return Protection(num_sinks=self.num_sinks, num_recent=self.num_recent)

    def key_scores(self, view: LayerView) -> Tensor:
        """[H, n] fp32, how little each key is like the mean key."""
        return KeyDiff().score(view)

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h, by score or by attention alone."""
        attended = observed_mass(replace(view, queries=view.queries[-self.near_size :]))
        has_room = kept >= self.min_kept * view.lengths
        scores = torch.where(has_room[:, None], scores, attended)
        return super().select(view, scores, kept, protection)
