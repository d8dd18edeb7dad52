"""Scores of a context's tokens: the highest attention that the tokens after it pay (KVzip).

    prompt   [ context: whole blocks ][ scoring tokens, such as the context repeated ]
    steps                             [ chunk ][ chunk ][ last chunk, then the event ]

The softmax of a query is complete when the query is computed, so the running maximum is all that
is stored: an fp32 number for each layer, KV head and token of the context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import HostNumbers
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.query_windows import QueryRows
from vllm_kvcompress.kernels.repetition_peaks import repetition_peaks
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.reconstruction import by_reconstruction
from vllm_kvcompress.rounding import ceil_div

logger = logging.getLogger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


@dataclass(frozen=True)
class Repetition:
    """One request's scoring tokens in a step.

    Attributes:
        request_id: vLLM's request id.
        blocks: [N] int64 block ids of the request.
        num_tokens: tokens of the request at the end of the step.
        queries: slice of the batch that holds its scoring tokens.
    """

    request_id: str
    blocks: Tensor
    num_tokens: int
    queries: slice


class Repetitions:
    """Scores of the requests of one cache group that prepare their contexts.

    Args:
        pool: page pool of the group.
        sinks: returns the [H, G] attention sinks of a layer, if it has any.
    """

    def __init__(
        self, pool: PagePool, sinks: Callable[[int], Tensor | None] = lambda layer: None
    ) -> None:
        self._pool, self._sinks = pool, sinks
        self._num_context: dict[str, int] = {}
        self._scores: dict[str, tuple[Tensor, ...]] = {}  # [H, context] by layer

    def register(self, preparations: Mapping[str, int]) -> None:
        """Adds requests with their numbers of context tokens."""
        self._num_context.update(preparations)

    def forget(self, request_id: str) -> None:
        """Drops a request; unknown ones are ignored."""
        self._num_context.pop(request_id, None)
        self._scores.pop(request_id, None)

    def in_step(
        self,
        row_of: Mapping[str, int],
        starts: HostNumbers,
        lengths: HostNumbers,
        block_table: Tensor,
    ) -> list[Repetition]:
        """Returns the scoring work of a step; a context that is read again is scored again.

        Args:
            row_of: row in the batch by request id.
            starts: [R + 1] first token of each row in the batch.
            lengths: [R] tokens of each request at the end of the step.
            block_table: [R, max_blocks] int32.
        """
        work, pool = [], self._pool
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
            work.append(Repetition(request_id, blocks, length, queries))
        return work

    def observe(self, layer: int, repetition: Repetition, queries: QueryRows, scale: float) -> None:
        """Scores a layer with a step's queries; an error leaves the request unscored.

        `queries` are [tokens, num_query_heads, head_size] of all requests.
        """
        if repetition.request_id not in self._scores:
            return
        try:
            self.score(layer, repetition, queries, scale)
        except Exception:
            logger.exception("request %s: its context cannot be scored", repetition.request_id)
            del self._scores[repetition.request_id]

    def score(self, layer: int, repetition: Repetition, queries: QueryRows, scale: float) -> None:
        """Scores a layer as `observe` does, and raises errors."""
        scores = self._scores[repetition.request_id][layer]
        table = self._pool.layer_page_ids(layer, repetition.blocks)
        keys = self._pool.keys(table, layer).flatten(1, 2)[:, : repetition.num_tokens]
        peaks = repetition_peaks(
            keys, queries[repetition.queries], scale, scores.shape[1], self._sinks(layer)
        )
        torch.maximum(scores, peaks, out=scores)

    def pipeline(self, request_id: str, base: Pipeline) -> Pipeline:
        """Returns a policy that ranks by a request's scores; the event fails without any."""
        return by_reconstruction(base, partial(self._of_layer, request_id))

    def _of_layer(self, request_id: str, layer: int) -> Tensor:
        """Returns [H, context] fp32 scores."""
        return self._scores[request_id][layer]
