"""Reconstruction (KVzip, arXiv 2505.23416): what a model attends to when it repeats a context.

Replaces another policy's scores where a request prepares a context for later ones. It is no policy
by itself, since an ordinary request repeats nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.parts.selection import Protection, Selector
from vllm_kvcompress.policies.pipeline import Pipeline

NUM_SINKS = 4  # as in the authors' code


@dataclass(frozen=True)
class Reconstruction:
    """Scores a token by the highest attention that it receives while the context is repeated.

    Eq. 1 of the paper: S_h[j] = max over i and g of A_h[g, i, j], where A_h[g, i] is the softmax
    of query i of the repetition and query head g of KV head h over the context's keys and the
    repetition's own up to i, and j a token of the context. The authors read the repetition in
    chunks of 2,048, whose queries see their own chunk of the context only; here they see all.

    Attributes:
        scores: [H, n] fp32 scores of a layer, collected while the repetition was read.
        needs: those of the policy that it replaces, less the queries, so that the event stores the
            policy state that this policy's next event reads.
    """

    scores: Callable[[int], Tensor]
    needs: Needs

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 highest attention, from 0 to 1."""
        return self.scores(view.layer)


def by_reconstruction(base: Pipeline, scores: Callable[[int], Tensor]) -> Pipeline:
    """Pipeline of a request that prepares a context: a policy's budgets with scores by layer.

    `base` is bound to the model and has no merger; scores are [H, n].
    """
    return replace(
        base,
        scorer=Reconstruction(scores, replace(base.needs, window_size=0)),
        selector=Selector(),
        protection=Protection(num_sinks=NUM_SINKS),
    )
