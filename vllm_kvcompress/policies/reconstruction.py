"""Reconstruction (KVzip, arXiv 2505.23416): what it takes to say a context again.

Takes the place of another policy's scores where a request prepares a context for later ones. No
policy by itself, since an ordinary request says nothing again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.parts.protection import Protection
from vllm_kvcompress.policies.parts.selection import Selector
from vllm_kvcompress.policies.pipeline import Pipeline

NUM_SINKS = 4  # first tokens, which the authors' code keeps too


@dataclass(frozen=True)
class Reconstruction:
    """The highest attention that a token receives while the context is repeated.

    Eq. 1 of the paper: S_h[j] = max over i and g of A_h[g, i, j], where A_h[g, i] is the softmax
    of query i of the repetition and query head g of KV head h over the context's keys and the
    repetition's own up to i, and j a token of the context. The authors read the repetition in
    chunks of 2,048, whose queries see their own chunk of the context only; here they see all.

    Attributes:
        scores: [H, n] fp32 scores of a layer, which were collected while the repetition was read.
        needs: those of the policy in whose place it is, so that what the event remembers of kept
            tokens is what that policy's next event wants to be told; but no queries.
    """

    scores: Callable[[int], Tensor]
    needs: Needs

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 from 0 to 1."""
        return self.scores(view.layer)


def by_reconstruction(base: Pipeline, scores: Callable[[int], Tensor]) -> Pipeline:
    """A policy's pipeline for a preparation: its budgets of layers and heads, and these scores.

    Args:
        base: bound to the model, without a merger.
        scores: of each layer.
    """
    return replace(
        base,
        scorer=Reconstruction(scores, replace(base.needs, window_size=0)),
        selector=Selector(),
        protection=Protection(num_sinks=NUM_SINKS),
    )
