"""Mean queries before RoPE, and their mean magnitudes, measured while prompts are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.query_windows import QueryRows
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.compression.repetitions import Repetition, Repetitions
from vllm_kvcompress.policies.triattention import pairs


class QueryMeans(Repetitions):
    """Adds up the queries of prompts, seen as those that would score a context.

    Args:
        pool: page pool of the group.
        weights: of its layers, with their rotation.
    """

    def __init__(self, pool: PagePool, weights: Sequence[LayerWeights]) -> None:
        super().__init__(pool)
        self._weights = weights
        self._sums: dict[int, Tensor] = {}
        self._count = 0

    def watch(self, request_id: str) -> None:
        """Measures the request that reads a prompt."""
        self.register({request_id: 0})

    def observe(self, layer: int, repetition: Repetition, queries: QueryRows, scale: float) -> None:
        """Adds a layer's queries of a step; parameters are those of `Repetitions.observe`."""
        rotary = self._weights[layer].rotary
        assert rotary is not None
        rows = queries[repetition.queries].float()
        first = repetition.num_tokens - len(rows)
        positions = torch.arange(first, repetition.num_tokens, device=rows.device)
        rows = rotary.rerotate(rows, -positions[:, None].expand(rows.shape[:2]))
        real, imaginary = rows[..., pairs(rotary, rows.shape[2])].double().chunk(2, dim=2)
        parts = torch.stack([real, imaginary, torch.hypot(real, imaginary)], dim=2)
        self._sums[layer] = self._sums.get(layer, 0) + parts.sum(dim=0)
        self._count += len(rows) * (layer == 0)

    def statistics(self) -> Tensor:
        """Returns [layers, query heads, 3, D/2] fp32: real and imaginary means, and magnitudes."""
        sums = torch.stack([self._sums[layer] for layer in range(len(self._sums))])
        return (sums / self._count).float()
