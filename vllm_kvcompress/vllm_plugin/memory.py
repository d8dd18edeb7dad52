"""How much of a GPU's memory compression needs beside the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvcompress.compression.workspace import EventShape, event_workspace_bytes
from vllm_kvcompress.policies import Pipeline

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Page tables hold 4 bytes for a page of some thousand; rows are as wide as the longest head's, and
# room is doubled when there is too little.
TABLES_SHARE = 0.01
RINGS = 8  # of last queries, at first
ROUNDING = 1.1  # of what an allocator takes for tensors of so many bytes


def reserved_bytes(vllm_config: VllmConfig, pipelines: dict[str, Pipeline], available: int) -> int:
    """Bytes that are not to become KV cache, on one rank.

    Args:
        vllm_config: says the longest request, and the model's shape.
        pipelines: the policies that requests may have.
        available: bytes for the cache and this.

    Returns:
        What an event of the longest request takes for a moment, in the layer it is at; rings of
        last queries; and page tables.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    shape = EventShape(
        num_tokens=model.max_model_len,
        num_layers=model.get_num_layers(parallel),
        num_heads=model.get_num_kv_heads(parallel),
        num_query_heads=model.get_num_attention_heads(parallel),
        head_size=model.get_head_size(),
        block_size=vllm_config.cache_config.block_size,
        dtype=model.dtype,
    )
    bound = [
        pipeline.bind(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_heads,
            num_query_heads=shape.num_query_heads,
            block_size=shape.block_size,
            tp_rank=parallel.rank % parallel.tensor_parallel_size,
            tp_size=parallel.tensor_parallel_size,
        )
        for pipeline in pipelines.values()
    ]
    event = max(event_workspace_bytes(pipeline, shape) for pipeline in bound)
    window = max(pipeline.needs.window_size for pipeline in bound)
    query = shape.num_layers * shape.num_query_heads * shape.head_size * shape.dtype.itemsize
    return int(ROUNDING * event + TABLES_SHARE * available) + RINGS * window * query
