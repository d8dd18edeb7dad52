"""Attention of compressed requests that vLLM's kernels do not give.

With a bias per entry, for those that stand for several tokens, and with outputs that are corrected
for what was evicted, which takes the log-sum-exp. Pages of GPUs go through kernels over pages;
those of CPUs, which only vLLM's own kernels read as they are, are gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.events import EventRunner
from vllm_kvcompress.kernels import attention_with_lse, correct_with_moments, paged
from vllm_kvcompress.kernels.paged_entries import PagedEntries
from vllm_kvcompress.pages import InterleavedPagePool, PagePool
from vllm_kvcompress.resident_batch import HostNumbers, ResidentBatch
from vllm_kvcompress.transfers import upload


@dataclass(frozen=True)
class QueryGroup:
    """Compressed requests of a step that have equally many queries in it.

    Attributes:
        tokens: [N, m] int64 places of their queries among the batch's tokens.
        slots: [N] int64 the requests' rows in the page tables.
        sequences: [N * num_heads] int64 their heads among the batch's; None: all, in order.
    """

    tokens: Tensor
    slots: Tensor
    sequences: Tensor | None

    def select(self, numbers: Tensor) -> Tensor:
        """The group's rows of [R * num_heads, ...] numbers of the batch."""
        return numbers if self.sequences is None else numbers[self.sequences]


def query_groups(batch: ResidentBatch, starts: HostNumbers) -> list[QueryGroup]:
    """All requests that decode together, and each that reads a chunk by itself.

    Args:
        batch: the compressed requests.
        starts: [rows + 1] first token of every row of the batch.
    """
    lengths = np.diff(starts)[batch.rows]
    decoding = np.flatnonzero(lengths == 1)
    groups = [_query_group(batch, decoding, starts, 1)] if len(decoding) else []
    for request in np.flatnonzero(lengths > 1):
        groups.append(_query_group(batch, request[None], starts, int(lengths[request])))
    return groups


def _query_group(
    batch: ResidentBatch, requests: HostNumbers, starts: HostNumbers, num_queries: int
) -> QueryGroup:
    device = batch.page_table.device
    num_heads = batch.page_table.shape[1] // len(batch.rows)
    first = starts[batch.rows[requests]].astype(np.int64)
    sequences = None
    if len(requests) < len(batch.rows):
        heads = np.arange(num_heads)
        sequences = upload((requests[:, None] * num_heads + heads).flatten(), device)
    return QueryGroup(
        tokens=upload(first[:, None] + np.arange(num_queries), device),
        slots=upload(batch.slots[requests], device),
        sequences=sequences,
    )


def gathered_attention(
    runner: EventRunner,
    layer: int,
    batch: ResidentBatch,
    group: QueryGroup,
    queries: Tensor,
    scale: float,
) -> Tensor:
    """Outputs for the group's queries, as the policy has them.

    Args:
        runner: holds the pages, and what the policy carries.
        layer: of the cache group.
        batch: the compressed requests.
        group: some of them.
        queries: [num_tokens, num_query_heads, head_size] of the batch.
        scale: of the logits.

    Returns:
        [N, m, num_query_heads, head_size].
    """
    pool, num_heads = runner.pool, runner.pool.num_heads
    page_table = group.select(batch.page_table[layer])
    lengths = group.select(batch.seq_lens[layer])
    mine = queries[group.tokens].unflatten(2, (num_heads, -1))
    mine = mine.permute(0, 2, 3, 1, 4).flatten(0, 1)
    bias = None
    if runner.pipeline.weighs_entries:
        width = page_table.shape[1] * pool.block_size
        bias = runner.entry_bias(layer, group.slots, width).flatten(0, 1)
    if isinstance(pool, InterleavedPagePool):
        outputs, lse = _over_pages(pool.entries(page_table, lengths), mine, scale, bias)
    else:
        keys, values = _copies(pool, page_table, lengths)
        outputs, lse = attention_with_lse(mine, keys, values, lengths.long(), scale, bias)
    if runner.pipeline.corrects:
        state = runner.carried(runner.tables.state[layer, group.slots]).flatten(0, 1)
        outputs = correct_with_moments(outputs, lse, mine, state, scale)
    return outputs.unflatten(0, (-1, num_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _over_pages(
    entries: PagedEntries, queries: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `attention_with_lse`, from pages as they are."""
    if queries.shape[2] > 1:
        outputs, lse = paged.prefill_attention(entries, queries, scale, bias)
        assert lse is not None
        return outputs, lse
    outputs, lse = paged.decode_attention(entries, queries[:, :, 0], scale, bias)
    assert lse is not None
    return outputs[:, :, None], lse[:, :, None]


def _copies(pool: PagePool, page_table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[S, n, head_size] keys and values, zeros behind the lengths.

    A page may hold anything there, such as numbers of another type.
    """
    page_ids = page_table.long()
    keys, values = pool.keys(page_ids).flatten(1, 2), pool.values(page_ids).flatten(1, 2)
    padding = torch.arange(keys.shape[1], device=keys.device) >= lengths[:, None]
    keys[padding] = values[padding] = 0
    return keys, values
