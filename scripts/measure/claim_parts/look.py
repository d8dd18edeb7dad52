"""A layer after its first tokens were compressed, and what later queries get of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attention_parts import AttentionParts, attend_in_parts
from offline.dense import DenseLayer, Kept, compress
from vllm_kvcompress.kernels.merging.moments import corrected, unpack_moments
from vllm_kvcompress.policies import Pipeline, resolve

QUERY_STRIDE = 8  # every eighth later query is looked at
WINDOW = 32  # that scores come from


@dataclass
class Look:
    """A layer after its first tokens were compressed.

    Attributes:
        layer: the whole.
        num_tokens: that are compressed.
    """

    layer: DenseLayer
    num_tokens: int

    def __post_init__(self) -> None:
        self._kept: dict[Any, Kept] = {}

    def kept(self, policy: str, budget: float, **params: Any) -> Kept:
        """What a policy keeps; decided once."""
        key = (policy, budget, *params.items())
        if key not in self._kept:
            pipeline = pipeline_of(policy, tuple(params.items()))
            self._kept[key] = compress(pipeline, self.layer, self.num_tokens, budget)
        return self._kept[key]

    def positions(self, observed: bool = False) -> Tensor:
        """Positions of the measured queries: later ones, or the window that scores come from."""
        if observed:
            return torch.arange(self.num_tokens - WINDOW, self.num_tokens)
        return torch.arange(self.num_tokens, len(self.layer.queries), QUERY_STRIDE)

    def queries(self, observed: bool = False) -> Tensor:
        """[m, H * G, D], times the scale."""
        return self.layer.queries[self.positions(observed)] * self.layer.scale

    def parts(
        self, mask: Tensor, observed: bool = False, values: Tensor | None = None
    ) -> AttentionParts:
        """Attention to some of the compressed tokens ([H, n] bool), and to all later ones.

        Of other values, if there are some: [H, all tokens, any].
        """
        layer = self.layer
        values = layer.values if values is None else values
        later = layer.keys.shape[1] - self.num_tokens
        kept = torch.nn.functional.pad(mask, (0, later), value=True)
        queries = self.queries(observed), self.positions(observed)
        return attend_in_parts(*queries, layer.keys, values, kept)

    def outputs(self, kept: Kept) -> tuple[Tensor, AttentionParts]:
        """What attention gives after a policy, its merger included; and the parts."""
        parts, merged, layer = self.parts(kept.mask), kept.merged, self.layer
        if merged.state is not None:
            return self._corrected(parts, merged.state), parts
        if merged.keys is None and merged.values is None:
            return parts.kept, parts
        keys, values = layer.keys.clone(), layer.values.clone()
        bias = torch.zeros(keys.shape[:2])
        for rows, some in ((keys, merged.keys), (values, merged.values), (bias, merged.bias)):
            if some is not None:
                rows[:, : self.num_tokens] = some
        later = keys.shape[1] - self.num_tokens
        mask = torch.nn.functional.pad(kept.mask, (0, later), value=True)
        asked = self.queries(), self.positions()
        return attend_in_parts(*asked, keys, values, mask, bias=bias).kept, parts

    def moments(self, kept: Kept) -> Tensor:
        """[H, moment_size] of what was evicted."""
        assert kept.merged.state is not None
        return unpack_moments(kept.merged.state, self.layer.keys.shape[2])

    def _corrected(self, parts: AttentionParts, state: Tensor) -> Tensor:
        layer = self.layer
        groups = (len(layer.keys), -1)
        by_head = [
            part.transpose(0, 1).unflatten(0, groups)
            for part in (parts.kept, parts.lse, layer.queries[self.positions()])
        ]
        moments = unpack_moments(state, layer.keys.shape[2])
        outputs = corrected(*by_head, moments, layer.scale)
        return outputs.flatten(0, 1).transpose(0, 1)


@cache
def pipeline_of(policy: str, params: tuple[tuple[str, Any], ...]) -> Pipeline:
    """With these parameters."""
    return resolve(policy, dict(params))
