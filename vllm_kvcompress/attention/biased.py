"""Attention with biases per entry, with sinks, or with outputs corrected for evicted tokens.

vLLM's kernels offer none of them head by head: a bias for an entry that stands for several tokens,
a sink of its own for each sequence, or the log-sum-exp that a correction needs. Pages on GPUs are
read by this package's kernels; pages on CPUs are gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import (
    HostNumbers,
    ResidentBatch,
    RowIndex,
    row_index,
    selected_rows,
)
from vllm_kvcompress.cache.pages import InterleavedPagePool, PagePool
from vllm_kvcompress.kernels.alibi import Alibi, attention_by_distance
from vllm_kvcompress.kernels.attention import (
    attention_with_lse,
    decode_attention,
    give_to_sinks,
    prefill_attention,
    sum_tiles,
)
from vllm_kvcompress.kernels.common.paged_entries import tile_size
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.common.tiles import finite, valid_entries
from vllm_kvcompress.kernels.merging.moments import correct_with_moments
from vllm_kvcompress.policies import Pipeline


class PagesOfPolicy(Protocol):
    """The pages of a cache group, and the policy of its compressed requests."""

    pool: PagePool

    @property
    def pipeline(self) -> Pipeline:
        """The policy of the requests."""

    def sinks(self, layer: int) -> Tensor | None:
        """Returns the [num_heads, group] attention sinks of a layer, if it has any."""

    def alibi(self, layer: int) -> Alibi | None:
        """Returns the biases by distance of a layer's attention, if it has any."""


@dataclass(frozen=True)
class QueryBatch:
    """Compressed requests of a step that have equally many queries in it.

    S = N * num_heads sequences, one for each KV head of N requests.

    Attributes:
        tokens: [N * m] rows of their queries in the batch.
        num_queries: m, the queries of each request.
        requests: the N requests.
    """

    tokens: RowIndex
    num_queries: int
    requests: ResidentBatch
    _tile_ends: list[Tensor] = field(default_factory=list, init=False)

    def tile_ends(self, pool: InterleavedPagePool) -> list[Tensor]:
        """Returns every layer's result of `sum_tiles`, computed once in the step's first layer."""
        if not self._tile_ends:
            tile_ends = torch.empty_like(self.requests.seq_lens)
            sum_tiles(self.requests.seq_lens, tile_ends, tile_size(pool))
            self._tile_ends.extend(tile_ends.unbind())
        return self._tile_ends

    def by_head(self, rows: Tensor, num_heads: int) -> Tensor:
        """[N * m, num_query_heads, head_size] -> [S, queries_per_kv, m, head_size].

        The result is a view, except for single queries in rows that are not consecutive.
        """
        group, head_size = rows.shape[1] // num_heads, rows.shape[2]
        if self.num_queries == 1:
            return rows.reshape(-1, group, 1, head_size)
        # N is 1 here.
        return rows.view(-1, num_heads, group, head_size).permute(1, 2, 0, 3)


def query_batches(batch: ResidentBatch, starts: HostNumbers) -> list[QueryBatch]:
    """Groups the requests: all that decode together, and each prefill chunk by itself.

    Args:
        batch: the compressed requests.
        starts: [rows + 1] first token of every row of the batch.
    """
    lengths, batches = np.diff(starts)[batch.rows], []
    chunks = [np.arange(len(lengths)) == request for request in np.flatnonzero(lengths > 1)]
    for which in (lengths == 1, *chunks):
        if which.any():
            first, num_queries = starts[batch.rows[which]].astype(np.int64), lengths[which][0]
            tokens = (first[:, None] + np.arange(num_queries)).flatten()
            index = row_index(tokens, batch.page_table.device)
            batches.append(QueryBatch(index, int(num_queries), batch.take(which)))
    return batches


def biased_attention(
    pages: PagesOfPolicy,
    layer: int,
    batch: QueryBatch,
    queries: Tensor,
    outputs: Tensor,
    scale: float,
) -> None:
    """Writes the attention outputs of the batch's queries, biased or corrected by the policy.

    Args:
        pages: pages of the cache group, the policy, and the layers' sinks.
        layer: layer of the cache group.
        batch: some of the compressed requests.
        queries, outputs: [num_tokens, num_query_heads, head_size] rows of the step.
        scale: softmax scale.
    """
    pool, pipeline = pages.pool, pages.pipeline
    numbers = batch.requests.policy_state
    state = None if numbers is None else numbers.layers[layer]
    bias, sinks = state if pipeline.weighs_entries else None, pages.sinks(layer)
    with_lse = pipeline.corrects or sinks is not None
    with selected_rows(batch.tokens, queries, outputs) as selected:
        heads, out = (batch.by_head(rows, pool.num_heads) for rows in selected)
        if (alibi := pages.alibi(layer)) is not None:
            assert state is not None
            _attend_by_distance(pool, layer, batch, heads, scale, alibi, state, out)
            return
        lse = _attend(pool, layer, batch, heads, scale, bias, with_lse, out)
        if pipeline.corrects:
            assert state is not None
            assert lse is not None
            correct_with_moments(state, out, lse, heads, scale)
        if sinks is not None:
            assert lse is not None
            give_to_sinks(out, lse, sinks)


def _attend(
    pool: PagePool,
    layer: int,
    batch: QueryBatch,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None,
    with_lse: bool,
    out: Tensor,
) -> Tensor | None:
    """Writes outputs shaped as the queries; returns [S, queries_per_kv, m] log-sum-exps or None."""
    page_table, lengths = batch.requests.layers[layer]
    if not isinstance(pool, InterleavedPagePool):
        keys, values = _gathered(pool, layer, page_table, lengths)
        biases = None if bias is None else bias.gathered(keys.shape[1])
        outputs, lse = attention_with_lse(queries, keys, values, lengths.long(), scale, biases)
        out.copy_(outputs)
        return lse
    entries = pool.entries(page_table, lengths)
    if queries.shape[2] > 1:
        return prefill_attention(entries, queries, scale, bias, with_lse, out)[1]
    ends = batch.tile_ends(pool)[layer]
    single, single_out = queries[:, :, 0], out[:, :, 0]
    lse = decode_attention(entries, single, scale, bias, with_lse, single_out, ends)[1]
    return None if lse is None else lse[:, :, None]


def _gathered(
    pool: PagePool, layer: int, page_table: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies the [S, n, D] keys and values of a layer's pages, 0 behind the lengths.

    Pages may hold anything there, such as numbers of another type.
    """
    page_ids = page_table.long()
    valid = valid_entries(lengths, page_table.shape[1] * pool.block_size)
    read = (pool.keys(page_ids, layer), pool.values(page_ids, layer))
    keys, values = (finite(rows.flatten(1, 2), valid) for rows in read)
    return keys, values


def _attend_by_distance(
    pool: PagePool,
    layer: int,
    batch: QueryBatch,
    queries: Tensor,
    scale: float,
    alibi: Alibi,
    kept: PagedNumbers,
    out: Tensor,
) -> None:
    """Writes outputs shaped as the queries, of attention with biases by distance.

    Kept tokens have their positions in the policy state; the others follow up to the last one.
    """
    page_table, lengths = batch.requests.layers[layer]
    keys, values = _gathered(pool, layer, page_table, lengths)
    num_entries, ends = keys.shape[1], (lengths - batch.requests.resident_offset[layer].flatten())
    places, ends = torch.arange(num_entries, device=pool.device), ends.long()
    positions = torch.where(
        places < kept.lengths[:, None],
        kept.gathered(num_entries).long(),
        places + (ends - lengths)[:, None],
    )
    out.copy_(attention_by_distance(queries, keys, values, positions, ends, scale, alibi))
