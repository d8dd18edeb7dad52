"""Attention of compressed requests that ordinary kernels do not give, over gathered pages.

With a bias per entry, for those that stand for several tokens, and with outputs that are corrected
for what was evicted, which takes the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.events import EventRunner
from vllm_kvcompress.kernels import attention_with_lse, correct_with_moments
from vllm_kvcompress.resident_batch import ResidentBatch


@dataclass(frozen=True)
class QueryGroup:
    """Compressed requests of a step that have equally many queries in it.

    Attributes:
        requests: [N] int64 among the batch's compressed requests.
        tokens: [N, m] int64 places of their queries among the batch's tokens.
    """

    requests: Tensor
    tokens: Tensor


def query_groups(batch: ResidentBatch, starts: Tensor) -> list[QueryGroup]:
    """All requests that decode together, and each that reads a chunk by itself.

    Args:
        batch: the compressed requests.
        starts: [rows + 1] first token of every row of the batch.
    """
    first = starts[:-1][batch.rows].long()
    lengths = (starts[1:] - starts[:-1])[batch.rows]
    decoding = (lengths == 1).nonzero()[:, 0]
    groups = [QueryGroup(decoding, first[decoding, None])] if decoding.numel() else []
    for request in (lengths > 1).nonzero()[:, 0]:
        tokens = first[request] + torch.arange(int(lengths[request]))
        groups.append(QueryGroup(request[None], tokens[None]))
    return groups


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
    heads = torch.arange(num_heads)
    sequences = (group.requests[:, None] * num_heads + heads).flatten()
    pages = batch.page_table[layer, sequences].long()
    lengths = batch.seq_lens[layer, sequences].long()
    mine = queries[group.tokens].unflatten(2, (num_heads, -1))
    mine = mine.permute(0, 2, 3, 1, 4).flatten(0, 1)
    keys, values = pool.keys(pages).flatten(1, 2), pool.values(pages).flatten(1, 2)
    # Behind a head's entries a page may hold anything, such as numbers of another type.
    padding = torch.arange(keys.shape[1]) >= lengths[:, None]
    keys[padding] = values[padding] = 0
    slots = torch.from_numpy(batch.slots)[group.requests]
    bias = None
    if runner.pipeline.weighs_entries:
        bias = runner.entry_bias(layer, slots, keys.shape[1]).flatten(0, 1)
    outputs, lse = attention_with_lse(mine, keys, values, lengths, scale, bias)
    if runner.pipeline.corrects:
        state = runner.carried(runner.tables.state[layer, slots]).flatten(0, 1)
        outputs = correct_with_moments(outputs, lse, mine, state, scale)
    return outputs.unflatten(0, (-1, num_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)
