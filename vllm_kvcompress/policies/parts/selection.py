"""Which tokens a head keeps, once it is known how many."""

from __future__ import annotations

from torch import Tensor

from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.parts.protection import Protection


class Selector:
    """Protected tokens first, then the best by score, unless a policy says otherwise."""

    @property
    def needs(self) -> Needs:
        """What the engine has to hand over besides keys."""
        return Needs()

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h, the protected ones among them."""
        first = scores.masked_fill(protection.mask(view, kept), float("inf"))
        return top_entries(first, view.valid, kept)
