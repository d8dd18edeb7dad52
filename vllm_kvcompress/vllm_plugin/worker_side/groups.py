"""The compressed cache groups of a worker: from vLLM's layers and caches to runners of events."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.attention.reading import SparseReads
from vllm_kvcompress.cache.host_blocks import HostBlocks
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PagePool, divided
from vllm_kvcompress.cache.quantization import LayerScaled
from vllm_kvcompress.cache.query_windows import PagedWindows, QueryWindows, Windows, window_blocks
from vllm_kvcompress.compression.batch import MAX_BATCH_LAYERS, MAX_BATCH_TOKENS
from vllm_kvcompress.compression.dummy_runs import DummyRuns
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.kernels.alibi import Alibi
from vllm_kvcompress.kernels.value_norms import output_roots
from vllm_kvcompress.policies import Pipeline, resolve_settings
from vllm_kvcompress.policies.base import Needs, PageShape
from vllm_kvcompress.policies.headkv import MeasuredHeads
from vllm_kvcompress.policies.parts.profiles import Table
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.rule import PolicyDemand
from vllm_kvcompress.vllm_plugin.compat.config import NULL_BLOCK, uses_alibi
from vllm_kvcompress.vllm_plugin.compat.layers import (
    attention_layers,
    cache_scales,
    latent_size,
    of_cached_values,
    output_projection,
    rotary_embedding,
    shared_caches,
)
from vllm_kvcompress.vllm_plugin.compat.relative import relative_extent
from vllm_kvcompress.vllm_plugin.spec import (
    MIN_BUFFERS,
    CompressedAttentionSpec,
    QueryBuffers,
    compressed_specs,
    has_full_attention,
    page_bytes_of,
    spill_slots,
)
from vllm_kvcompress.vllm_plugin.startup.graphs import reason_for_pieces
from vllm_kvcompress.vllm_plugin.startup.layer_refusals import (
    check_classes,
    check_groups,
    check_latents,
    check_layer,
    check_page_sizes,
    num_sharing_layers,
)
from vllm_kvcompress.vllm_plugin.startup.quantized import key_dtype, set_mean_keys
from vllm_kvcompress.vllm_plugin.worker_side.ranks import layers_around
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression


class WorkerGroups:
    """What a worker compresses with: its policies, and a runner of events for each cache group.

    Attributes:
        settings: the user's settings.
        pipelines: the policies of requests, the server's own first (not yet bound to heads).
        groups: compressed cache groups by vLLM's group number.
        group_of_layer: the same by vLLM's names of layers.
        caches: by names of layers whose blocks are divided, their caches in the parts.
        heads_from: where measured heads come from, as the status page shows it.
        reason_for_pieces: why CUDA graphs are piecewise; None: they are of whole decode steps.
        own_kernels: whether this package's kernels attend for every compressed request.
        has_sinks: whether layers have attention sinks, which vLLM's kernels take by head, not by
            sequence.
        max_split_sequences: most sequences (one per KV head of each compressed request) that
            vLLM's kernels take in a step without waiting for the longest; None: any number.
    """

    def __init__(self, vllm_config: VllmConfig, settings: Settings) -> None:
        self.vllm_config = vllm_config
        self.settings = settings
        model = vllm_config.model_config
        by_position, num_near = uses_alibi(model), max(0, relative_extent(model) - 1)
        self.pipelines: dict[str, Pipeline] = {
            policy: pipeline.for_model(attends_by_position=by_position, num_near=num_near)
            for policy, pipeline in resolve_settings(settings).items()
        }
        self.reason_for_pieces = reason_for_pieces(vllm_config, settings)
        self.own_kernels = settings.attention == "own" or self.reason_for_pieces is None
        self.has_sinks = False
        self.groups: dict[int, GroupCompression] = {}
        self.group_of_layer: dict[str, GroupCompression] = {}
        self.caches: dict[str, torch.Tensor] = {}
        self.heads_from = "none"
        self.max_split_sequences: int | None = None
        self._model_runner: Any = None
        self._profiled_runner: Any = None

    @property
    def needs(self) -> Needs:
        """Everything that at least one policy needs."""
        return reduce(Needs.joined, (pipeline.needs for pipeline in self.pipelines.values()))

    def takes_own_kernels(self, num_sequences: int = 0) -> bool:
        """Whether this package's kernels attend for a step's compressed requests.

        They do so always, or where a policy or the model needs more than vLLM's kernels compute,
        or where vLLM's would wait for the longest of `num_sequences`.
        """
        policies_need_it = any(p.needs_biased_attention for p in self.pipelines.values())
        too_many = self.max_split_sequences is not None and num_sequences > self.max_split_sequences
        return policies_need_it or too_many or self.own_kernels or self.has_sinks

    @property
    def num_query_heads(self) -> int:
        """Query heads per layer, on this rank."""
        config = self.vllm_config
        heads: int = config.model_config.get_num_attention_heads(config.parallel_config)
        return heads

    def demands(self, spec: AttentionSpec, split: int = 1) -> tuple[tuple[str, PolicyDemand], ...]:
        """Returns what every policy, by name, asks of the rule that plans its events.

        Args:
            spec: a layer's, with attention kernels' blocks as blocks.
            split: number of these in a block of vLLM's, of which ceilings and ring buffers are.

        Raises:
            ConfigError: a budget in tokens leaves no page per layer and head beside the policy
                state, or fewer tokens than are protected.
        """
        page_bytes = page_bytes_of(spec)
        shape = PageShape(spec.num_kv_heads, spec.head_size, spec.block_size, page_bytes)
        sizes = spec.block_size * split, page_bytes * split
        allocated = PageShape(spec.num_kv_heads, spec.head_size, *sizes)
        demands = []
        for policy, pipeline in self.pipelines.items():
            if isinstance(self.settings.budget, int):
                pipeline.check_room(self.settings.budget, shape)
            for ceiling in self.settings.ceilings:
                pipeline.check_ceiling(ceiling, allocated)
            demand = pipeline.demand(shape)
            if self.settings.pressure_mark is not None and demand.window_size:
                row_bytes = spec.head_size * key_dtype(spec, self.vllm_config).itemsize
                ring = window_blocks(
                    self.needs.window_size,
                    self.num_query_heads,
                    spec.num_kv_heads,
                    page_bytes // row_bytes,
                )
                demand = replace(demand, window_blocks=ceil_div(ring, split))
            demands.append((policy, demand))
        return tuple(demands)

    def bind(self, model_runner: Any, kv_cache_config: KVCacheConfig) -> None:
        """Lays page views over the allocated cache."""
        self._model_runner = model_runner
        self.caches.clear()
        for number, layers, spec in self.compressed_groups(kv_cache_config.kv_cache_groups):
            self.groups[number] = bound = self._bind_group(number, layers, spec)
            self.group_of_layer |= dict.fromkeys((*bound.layer_index, *bound.sharing), bound)

    def allocate_host_memory(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates this rank's part of the host memory that kept states are copied to."""
        if self.settings.spill is None:
            return
        for number, _, spec in self.compressed_groups(kv_cache_config.kv_cache_groups):
            num_slots, group = spill_slots(self.vllm_config, spec), self.groups[number]
            group.host = HostBlocks(group.tables.pool, num_slots)

    def compressed_groups(
        self, groups: list[KVCacheGroupSpec]
    ) -> list[tuple[int, list[Any], CompressedAttentionSpec]]:
        """Returns number, layers and spec of the cache groups that are compressed.

        Raises:
            UnsupportedError: layers do not work with compression.
        """
        names, compressed = [], []
        for number, group in enumerate(groups):
            specs = compressed_specs(group.kv_cache_spec)
            check_page_sizes(specs)
            if specs and group.layer_names:  # a pipeline stage may have none of a group
                layers = attention_layers(self.vllm_config, group.layer_names)
                check_classes(dict(zip(group.layer_names, layers, strict=True)))
                names.append(group.layer_names)
                compressed.append((number, layers, specs[0]))
            elif has_full_attention(group.kv_cache_spec):
                layers = attention_layers(self.vllm_config, group.layer_names)
                check_classes(dict(zip(group.layer_names, layers, strict=True)))
        is_known = num_sharing_layers(self.vllm_config.model_config) > 0
        shared = {} if is_known else shared_caches(self.vllm_config)
        check_groups(names, self.pipelines, shared)
        for _, layers, _ in compressed:
            check_latents(layers, self.vllm_config.model_config)
            for layer in layers:
                check_layer(layer, self.settings, self.own_kernels, self.pipelines)
        return compressed

    @contextmanager
    def profiling(self, model_runner: Any) -> Iterator[None]:
        """Lets vLLM measure CUDA graphs with this package's attention in them.

        vLLM captures some over a small cache, which it then drops; nothing may refer to it later.
        """
        if self.reason_for_pieces is None:
            self._profiled_runner = model_runner
        try:
            yield
        finally:
            self._profiled_runner = self._model_runner = None
            if self.groups:
                self.groups.clear()
                self.caches.clear()
                self.group_of_layer.clear()
                gc.collect()
                torch.accelerator.empty_cache()

    def group_of(self, layer_name: str) -> GroupCompression | None:
        """Returns a layer's group; while vLLM profiles graphs, one over its small cache."""
        if layer_name not in self.group_of_layer and self._profiled_runner is not None:
            runner, self._profiled_runner = self._profiled_runner, None
            self.bind(runner, runner.kv_cache_config)
        return self.group_of_layer.get(layer_name)

    def _bind_group(
        self, number: int, layers: list[Any], spec: CompressedAttentionSpec
    ) -> GroupCompression:
        self.has_sinks = self.has_sinks or any(layer.impl.sinks is not None for layer in layers)
        caches = [by_head(layer.kv_cache) for layer in layers]
        for layer in layers:
            layer.impl.mean_key = None  # what probes the cache is stored as it is
        if spec.split > 1:
            caches = [divided(cache, spec.split) for cache in caches]
        pool = layers[0].get_attn_backend().page_pool(layers, caches, spec.of_kernels)
        if spec.split > 1:
            self.caches |= {layer.layer_name: kv for layer, kv in zip(layers, caches, strict=True)}
        if pool.quantization is not None:
            set_mean_keys(layers, self._model_runner.model, self.vllm_config)
        runner = self.make_runner(layers, pool, self._model_runner.model)
        index = {layer.layer_name: i for i, layer in enumerate(layers)}
        scales = [layer.impl.scale for layer in layers]
        softcap = layers[0].impl.logits_soft_cap or 0.0
        readers, steps = self._make_readers(runner), self._decode_steps(layers, pool, runner)
        sharing = {
            layer.layer_name: (shared, window) for layer, shared, window in self._sharing(layers)
        }
        group = GroupCompression(number, runner, index, scales, softcap, readers, steps, sharing)
        group.split = spec.split
        self.caches |= {
            name: self.caches[layers[of].layer_name]
            for name, (of, _) in sharing.items()
            if spec.split > 1
        }
        return group

    def _sharing(self, layers: list[Any]) -> list[tuple[Any, int, int]]:
        """Returns the layers that read the caches of these.

        Each comes with the number of the layer whose cache it reads, and that of its ring buffers,
        which lie behind those of `layers`.
        """
        names = [layer.layer_name for layer in layers]
        shared = shared_caches(self.vllm_config)
        sharing = [name for name, owner in shared.items() if owner in names]
        readers = attention_layers(self.vllm_config, sharing)
        return [
            (layer, names.index(shared[layer.layer_name]), number)
            for number, layer in enumerate(readers, start=len(layers))
        ]

    def _make_readers(self, runner: EventRunner) -> SparseReads | None:
        """Makes the sparse-read state of a cache group, if --kv-read is given."""
        if self.settings.read_rule is None:
            return None
        others = (group.readers for group in self.groups.values() if group.readers is not None)
        summaries = [each.summaries for each in others]
        return SparseReads(self.settings.read_rule, runner.tables, summaries)

    def _decode_steps(
        self, layers: list[Any], pool: PagePool, runner: EventRunner
    ) -> DecodeSteps | None:
        """Makes what full CUDA graphs of decode steps read; None: graphs are piecewise."""
        if self.reason_for_pieces is not None or not isinstance(pool, InterleavedPagePool):
            return None
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        scales, observes = [layer.impl.scale for layer in layers], self.needs.window_size > 0
        num_heads, by_layer = layers[0].impl.num_heads, enumerate(runner.weights)
        sinks = {layer: each.sinks for layer, each in by_layer if each.sinks is not None}
        pipeline = runner.pipeline
        return DecodeSteps(pool, max_num_seqs, num_heads, scales, pipeline, observes, sinks)

    def make_runner(self, layers: list[Any], pool: PagePool, model: Any) -> EventRunner:
        """Makes the runner of these layers' events, for the cache that `pool` views."""
        windows: Windows
        sharing = self._sharing(layers)
        if self.settings.pressure_mark is None:
            buffers = QueryBuffers.of(self.vllm_config, self.settings)
            number = buffers.number if pool.device.type == "cuda" else MIN_BUFFERS
            num_layers = len(layers) + len(sharing)
            windows = QueryWindows(num_layers, self.needs.window_size, pool.device, number)
        else:
            windows = PagedWindows(pool, self.needs.window_size, layers[0].impl.num_heads)
        weights = self._weights(layers, model, pool.num_heads)
        windows_of: dict[int, list[int]] = {}
        for _, shared, window in sharing:
            windows_of.setdefault(shared, []).append(window)
        longest = self.vllm_config.model_config.max_model_len
        most_tokens = min(MAX_BATCH_TOKENS, MAX_BATCH_LAYERS * longest)
        scales = {layer.impl.scale for layer in layers}
        alike = len(scales) == 1 and all(each.rotates_like(weights[0]) for each in weights)
        alike = alike and not sharing  # the others' groups of query heads are longer
        pipelines = self._bind_pipelines(layers, pool)
        tables = PageTables(pool)
        return EventRunner(tables, windows, pipelines, weights, most_tokens, alike, windows_of)

    def _weights(self, layers: list[Any], model: Any, num_kv_heads: int) -> list[LayerWeights]:
        """Returns what policies need of the weights of these layers and those that read their
        caches.
        """
        weights = [layer_weights(layer, model, self.needs) for layer in layers]
        for layer, shared, _ in self._sharing(layers):
            more = layer_weights(layer, model, self.needs)
            weights[shared] = weights[shared].joined(more, num_kv_heads)
        return weights

    def _bind_pipelines(self, layers: list[Any], pool: PagePool) -> dict[str, Pipeline]:
        """Binds every policy to the layers and to this rank's heads."""
        parallel = self.vllm_config.parallel_config
        first_layer, later_layers = layers_around(len(layers))
        return {
            policy: pipeline.bind(
                num_layers=len(layers),
                num_kv_heads=pool.num_heads,
                num_query_heads=layers[0].impl.num_heads,
                block_size=pool.block_size,
                tp_rank=parallel.rank % parallel.tensor_parallel_size,
                tp_size=parallel.tensor_parallel_size,
                first_layer=first_layer,
                later_layers=later_layers,
            )
            for policy, pipeline in self.pipelines.items()
        }

    @property
    def lacks_heads(self) -> bool:
        """Whether a policy divides its budget by measured heads and has none yet."""
        allocators = (pipeline.allocator for pipeline in self.pipelines.values())
        return any(isinstance(a, MeasuredHeads) and not a.importance for a in allocators)

    def use_heads(self, importance: Table, source: str) -> None:
        """Gives measured heads to the policies that have none.

        Args:
            importance: by layer and query head of all ranks.
            source: where the heads come from.
        """
        self.heads_from = source
        for policy, pipeline in self.pipelines.items():
            allocator = pipeline.allocator
            if isinstance(allocator, MeasuredHeads) and not allocator.importance:
                allocator = allocator.with_importance(importance)
                self.pipelines[policy] = replace(pipeline, allocator=allocator)
        for group in self.groups.values():
            layers = attention_layers(self.vllm_config, list(group.layer_index))
            group.runner.pipelines = self._bind_pipelines(layers, group.tables.pool)

    def warm_up(self) -> None:
        """Runs this package's kernels once, so that no request waits for their compilation."""
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        for group in self.groups.values():
            attends = self.takes_own_kernels(max_num_seqs * group.tables.pool.num_heads)
            DummyRuns(group.runner, self.num_query_heads, NULL_BLOCK).warm_up(attends)
            if group.decode_steps is not None:
                group.decode_steps.warm_up(NULL_BLOCK)
        self.warm_up_readers()

    def warm_up_readers(self) -> None:
        """Runs the kernels that choose pages once; they are compiled on CPUs, too."""
        for group in self.groups.values():
            readers = group.readers if group.drafts is None else group.drafts.readers
            if readers is not None:
                readers.warm_up(self.num_query_heads // group.tables.pool.num_heads)

    def refresh_weights(self) -> None:
        """Reads what policies need of the model's weights from the weights again."""
        for group in self.groups.values():
            layers = attention_layers(self.vllm_config, list(group.layer_index))
            if isinstance(quantization := group.tables.pool.quantization, LayerScaled):
                quantization.set_scales(cache_scales(layers))
            model, num_kv_heads = self._model_runner.model, group.tables.pool.num_heads
            group.runner.weights[:] = self._weights(layers, model, num_kv_heads)
            if group.runner.norms is not None:
                group.runner.norms.forget_all()


def by_head(cache: torch.Tensor) -> torch.Tensor:
    """Returns a layer's cache with an axis of KV heads, which that of latent rows lacks."""
    return cache if cache.dim() == 4 else cache.unsqueeze(1)


def layer_weights(layer: Any, model: Any, needs: Needs) -> LayerWeights:
    """Reads what policies need of an attention layer's weights."""
    rotary = root = by_kv_head = sinks = alibi = None
    if layer.impl.sinks is not None:
        sinks = layer.impl.sinks.view(layer.impl.num_kv_heads, -1)
    if layer.impl.alibi_slopes is not None:
        slopes = layer.impl.alibi_slopes.float().view(layer.impl.num_kv_heads, -1)
        alibi = Alibi(slopes, getattr(layer.impl, "use_alibi_sqrt", False))
    if needs.positions or needs.rotary:
        rotary = rotary_embedding(model, layer)
    if needs.output_weight or needs.output_root:
        impl = layer.impl
        value_size = impl.head_size if latent_size(layer) is None else impl.v_head_dim
        width = impl.num_heads * value_size
        flat = output_projection(model, layer.layer_name, width)
        weight = flat.t().reshape(impl.num_heads, value_size, -1)
        if needs.output_root:
            root = of_cached_values(layer, output_roots(weight))
        if needs.output_weight:
            weight = of_cached_values(layer, weight)
            by_kv_head = weight.unflatten(0, (impl.num_kv_heads, -1)).transpose(1, 2)
            if not by_kv_head.is_cuda:  # GPU kernels read it as it lies, and memory is scarce there
                by_kv_head = by_kv_head.contiguous()
    return LayerWeights(by_kv_head, root, rotary, sinks, alibi)
