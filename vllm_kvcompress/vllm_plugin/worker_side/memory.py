"""Measures how much GPU memory compression needs beside the KV cache.

Before the cache is allocated, events of the longest request run on a single block that stands for
all of its blocks. Their peak memory is reserved and does not become KV cache.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_kvcompress.attention.reading import summary_kind
from vllm_kvcompress.cache.page_summaries import SummaryKind
from vllm_kvcompress.cache.pages import FlatPages
from vllm_kvcompress.compression.dummy_runs import DummyRuns
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.compat.layers import attention_layers
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec, page_bytes_of
from vllm_kvcompress.vllm_plugin.startup.quantized import key_dtype
from vllm_kvcompress.vllm_plugin.worker_side.groups import WorkerGroups

# Page tables hold 4 bytes for a page of some thousand; rows are as wide as the longest head's, and
# room is doubled when there is too little.
TABLES_SHARE = 0.01
FRAGMENTATION = 1.1  # bytes that an allocator takes from the device for each that it hands out


def reserved_bytes(
    compression: WorkerGroups, model: Any, specs: dict[str, KVCacheSpec], available: int
) -> int:
    """Returns bytes of the `available` ones that must not become KV cache, on one rank.

    Raises:
        UnsupportedError: an event does not even fit beside the model.
    """
    layers: dict[tuple[int, int], list[str]] = {}
    for name, spec in specs.items():
        if isinstance(spec, CompressedAttentionSpec):
            layers.setdefault((spec.num_kv_heads, spec.head_size), []).append(name)
    events = [_event_bytes(compression, model, names, specs[names[0]]) for names in layers.values()]
    rule = compression.settings.read_rule
    kinds = [
        (specs[names[0]], key_dtype(specs[names[0]], compression.vllm_config), summary_kind(rule))
        for names in layers.values()
        if rule is not None
    ]
    return reserve(sum(events), available, kinds)  # every kind keeps its ring buffers


def reserve(
    event_bytes: int,
    available: int,
    summarised: Sequence[tuple[Any, torch.dtype, SummaryKind]] = (),
) -> int:
    """Returns bytes that must not become KV cache, without the scratch of vLLM's kernels.

    Args:
        event_bytes: peak of the events' memory, ring buffers included.
        available: bytes for the cache and these.
        summarised: one spec of each kind of layer whose pages have summaries, with the type of
            its keys and the kind of summary.
    """
    reserved = int(FRAGMENTATION * event_bytes + TABLES_SHARE * available)
    room = available - reserved
    for spec, dtype, kind in summarised:
        reserved += kind.share(room, page_bytes_of(spec), spec.head_size, dtype)
    return reserved


def _event_bytes(compression: WorkerGroups, model: Any, names: list[str], spec: Any) -> int:
    """Returns the peak memory of events of every policy, in bytes.

    It includes the first page tables, ring buffers and what policies compute from weights.
    """
    memory = torch.accelerator
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    try:
        _run_longest(compression, model, names, spec)
    except torch.OutOfMemoryError as error:
        num_tokens = compression.vllm_config.model_config.max_model_len
        raise UnsupportedError(
            f"an event of a request of {num_tokens} tokens does not fit in the GPU's memory beside "
            "the model; lower --max-model-len, or take a policy that needs less (docs/gpu.md)."
        ) from error
    peak = int(memory.max_memory_allocated() - before)
    gc.collect()
    memory.empty_cache()
    return peak


def _run_longest(compression: WorkerGroups, model: Any, names: list[str], spec: Any) -> None:
    layers = attention_layers(compression.vllm_config, names)
    device, spec = next(model.parameters()).device, spec.of_kernels
    page_size = page_bytes_of(spec) // spec.dtype.itemsize
    pages = torch.zeros(spec.num_kv_heads, page_size, dtype=spec.dtype, device=device)
    flat = FlatPages(pages, spec.num_kv_heads, [0] * len(layers))
    pool = layers[0].get_attn_backend().pool_over(layers, spec, flat)
    runner = compression.make_runner(layers, pool, model)
    num_tokens = compression.vllm_config.model_config.max_model_len
    runs = DummyRuns(runner, compression.num_query_heads, block=0)
    runs.longest(num_tokens, prepares=compression.settings.reuse_contexts)
