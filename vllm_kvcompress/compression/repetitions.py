"""What the tokens behind a context attend to of it, collected while they are read.

    prompt   [ context: whole blocks ][ what scores it, such as the context once more ]
    steps                             [ some ][ some more ][ the last, and the event ]

Of every query the softmax is complete when it is computed, so the highest attention so far is all
that has to be remembered: an fp32 number per layer, KV head and token of the context.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import HostNumbers
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.repetition_peaks import repetition_peaks
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.reconstruction import by_reconstruction
from vllm_kvcompress.rounding import ceil_div

logger = logging.getLogger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


@dataclass(frozen=True)
class Repetition:
    """What a step computes of one request behind its context.

    Attributes:
        request_id: vLLM's.
        blocks: [N] int64 the blocks of all tokens.
        num_tokens: of the request at the end of the step.
        queries: places in the batch of those behind the context.
    """

    request_id: str
    blocks: Tensor
    num_tokens: int
    queries: slice


class Repetitions:
    """Of one cache group's requests that prepare their contexts.

    Args:
        pool: the pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._num_context: dict[str, int] = {}
        self._scores: dict[str, tuple[Tensor, ...]] = {}  # of every layer, [H, context]

    def tell(self, preparations: Mapping[str, int]) -> None:
        """Takes requests, and how many tokens of context each has."""
        self._num_context.update(preparations)

    def forget(self, request_id: str) -> None:
        """Drops a request; unknown ones are ignored."""
        self._num_context.pop(request_id, None)
        self._scores.pop(request_id, None)

    def of_step(
        self,
        row_of: Mapping[str, int],
        starts: HostNumbers,
        lengths: HostNumbers,
        block_table: Tensor,
    ) -> list[Repetition]:
        """What a step computes behind contexts. One that is read anew is scored anew.

        Args:
            row_of: by request its row in the batch.
            starts: [R + 1] first tokens of requests in the batch.
            lengths: [R] tokens of requests at the end of the step.
            block_table: [R, max_blocks] int32.
        """
        found, pool = [], self._pool
        for request_id, num_context in self._num_context.items():
            row = row_of.get(request_id)
            if row is None or lengths[row] <= num_context:
                continue
            end, length = int(starts[row + 1]), int(lengths[row])
            first = max(num_context, length - (end - int(starts[row])))
            if first == num_context:
                shape = (pool.num_layers, pool.num_heads, num_context)
                zeros = torch.zeros(shape, dtype=torch.float32, device=pool.device)
                self._scores[request_id] = zeros.unbind()
            blocks = block_table[row, : ceil_div(length, pool.block_size)].to(torch.int64)
            queries = slice(end - (length - first), end)
            found.append(Repetition(request_id, blocks, length, queries))
        return found

    def observe(self, layer: int, repetition: Repetition, queries: Tensor, scale: float) -> None:
        """Adds what a step's queries attend to in a layer; errors leave the request unscored.

        Args:
            layer: of the group.
            repetition: of one request.
            queries: [tokens, num_query_heads, head_size] of all requests.
            scale: softmax scale.
        """
        if repetition.request_id not in self._scores:
            return
        try:
            self.score(layer, repetition, queries, scale)
        except Exception:
            logger.exception("request %s: its context cannot be scored", repetition.request_id)
            del self._scores[repetition.request_id]

    def score(self, layer: int, repetition: Repetition, queries: Tensor, scale: float) -> None:
        """As `observe`; errors are raised."""
        mine = self._scores[repetition.request_id][layer]
        keys = self._keys(repetition, layer)
        found = repetition_peaks(keys, queries[repetition.queries], scale, mine.shape[1])
        torch.maximum(mine, found, out=mine)

    def _keys(self, repetition: Repetition, layer: int) -> Tensor:
        """[H, num_tokens, D] of all tokens so far, in a layer."""
        table = self._pool.layer_page_ids(layer, repetition.blocks)
        return self._pool.keys(table, layer).flatten(1, 2)[:, : repetition.num_tokens]

    def pipeline(self, request_id: str, base: Pipeline) -> Pipeline:
        """A policy's, with the scores of a request; where there are none it fails at the event."""
        return by_reconstruction(base, partial(self._of_layer, request_id))

    def _of_layer(self, request_id: str, layer: int) -> Tensor:
        """[H, context] fp32."""
        return self._scores[request_id][layer]
