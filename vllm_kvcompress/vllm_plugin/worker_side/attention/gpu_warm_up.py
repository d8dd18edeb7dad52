"""Runs vLLM's attention over single heads once, before there are requests.

Triton's kernels and those of FlashAttention 4 are compiled when they first run. Triton compiles a
kernel once for numbers and addresses that are divisible by 16, and once for others.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvcompress.attention.batch import CompressedRows, HostNumbers, ResidentBatch
from vllm_kvcompress.cache.pages import LatentPagePool
from vllm_kvcompress.vllm_plugin.compat.config import NULL_BLOCK
from vllm_kvcompress.vllm_plugin.compat.layers import attention_layers
from vllm_kvcompress.vllm_plugin.compat.worker import metadata_builder
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

ALIGNMENT = 16
LAYERS = 4  # their rows of lengths begin at addresses of every alignment


def warm_up_heads(compression: WorkerCompression, model_runner: Any) -> None:
    """Attends for few and for 16 sequences, with one query each and with two.

    Pages of the null block stand for kept tokens.
    """
    for number, group in compression.groups.items():
        layers = attention_layers(compression.vllm_config, list(group.layer_index))
        builder = metadata_builder(model_runner, number, layers[0].layer_name)
        if isinstance(group.tables.pool, LatentPagePool):
            longest = compression.vllm_config.model_config.max_model_len
            _attend_latents(group, builder, layers, longest)
            continue
        for num_requests in {1, ALIGNMENT // gcd(ALIGNMENT, group.tables.pool.num_heads)}:
            for num_queries in (1, 2):
                _attend(group, builder, layers, num_requests, num_queries)


def _attend(
    group: GroupCompression,
    builder: Any,
    layers: list[Any],
    num_requests: int,
    num_queries: int,
) -> None:
    pool, impl = group.tables.pool, layers[0].impl
    starts: HostNumbers = np.arange(num_requests + 1, dtype=np.int32) * num_queries
    common = _common(starts, num_queries, pool)
    subset = builder.per_head(_batch(num_requests, pool), builder.build_all(common), common, starts)
    shape = (common.num_actual_tokens, impl.num_heads, pool.head_size)
    rows = pool.pages.new_zeros(shape, dtype=pool.dtype)
    for index, layer in enumerate(layers[:LAYERS]):
        layer.impl.attend_per_head(layer, subset, index, group, rows, torch.empty_like(rows))


def _attend_latents(group: GroupCompression, builder: Any, layers: list[Any], longest: int) -> None:
    """Attends for one request at every number of splits that vLLM has for requests up to `longest`.

    The number is a power of two and grows at lengths that are; a kernel is compiled for each.
    """
    pool, impl, batch = group.tables.pool, layers[0].impl, _batch(1, group.tables.pool)
    common = _common(np.arange(2, dtype=np.int32), 1, pool)
    metadata = builder.decodes(batch, builder.build_plain(common)).metadata
    rows = pool.pages.new_zeros((1, impl.num_heads, pool.head_size))
    for length in (*(1 << exponent for exponent in range(longest.bit_length())), longest):
        metadata.max_seq_len = length
        for index, layer in enumerate(layers[:LAYERS]):
            fields = builder.layer_fields(batch, common.query_start_loc)[index]
            layer.impl.attend_kept(group, metadata, fields, rows)


def _common(starts: Any, num_queries: int, pool: Any) -> CommonAttentionMetadata:
    """Makes vLLM's metadata of requests that hold one block."""
    num_requests, device = len(starts) - 1, pool.device
    lengths = torch.full((num_requests,), pool.block_size, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=num_requests,
        num_actual_tokens=int(starts[-1]),
        max_query_len=num_queries,
        max_seq_len=pool.block_size,
        block_table_tensor=torch.zeros((num_requests, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device=device),
    )


def _batch(num_requests: int, pool: Any) -> ResidentBatch:
    """Makes compressed requests with one page per head."""
    rows = CompressedRows.of(np.arange(num_requests, dtype=np.int64), pool.device)
    sequences = (pool.num_layers, num_requests * pool.num_heads)
    numbers = {"dtype": torch.int32, "device": pool.device}
    page = NULL_BLOCK * pool.pages_per_block
    return ResidentBatch(
        **vars(rows),
        page_table=torch.full((*sequences, ALIGNMENT), page, **numbers),
        seq_lens=torch.full(sequences, pool.block_size, **numbers),
        resident_offset=torch.zeros((pool.num_layers, num_requests, pool.num_heads), **numbers),
        same_in_all_layers=True,
    )
