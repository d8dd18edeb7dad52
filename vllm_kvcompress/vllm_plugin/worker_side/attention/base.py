"""Attention of compressed requests, whatever backend of vLLM's it is: called once more, per head.

Every (request, KV head) is a sequence of its own for the backend's kernels, with one KV head and
the query heads that share it, so that heads may own any pages, as many as they like. The kernels
take the flat page array for a cache of one head. The classes here are mixed into vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvcompress.attention.batch import (
    EVERY_ROW,
    ResidentBatch,
    RowIndex,
    row_index,
    selected_rows,
)
from vllm_kvcompress.attention.biased import QueryBatch, biased_attention, query_batches
from vllm_kvcompress.attention.reading import SparseRead
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    dependent_on_compressed,
    is_compressible,
)
from vllm_kvcompress.vllm_plugin.worker_side.attention.sequences import HostNumbers, sequences
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression, StepWork
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

_ATTRIBUTE = "kvcompress"  # of vLLM's metadata


@dataclass
class Subset:
    """Some of a step's requests, as vLLM's backend takes them.

    Attributes:
        metadata: vLLM's own, for these requests alone.
        where: [T] rows of the queries that belong to them.
        by_layer: what differs from layer to layer in the metadata; empty: nothing.
        reading: which part of their pages they read; None: all.
    """

    metadata: Any
    where: RowIndex
    by_layer: list[dict[str, Any]] = field(default_factory=list)
    reading: SparseRead | None = None


@dataclass
class CompressedMetadata:
    """What compression does in a step; travels on vLLM's metadata.

    Attributes:
        work: events, and the compressed requests (work.compressed empty: there are none).
        num_tokens: of the step, without what pads it to a CUDA graph's size.
        per_head: the compressed requests, for vLLM's kernels: those that read everything, and
            those that read a part.
        biased: or for this package's attention.
        uncompressed: the others, where there are compressed ones.
    """

    work: StepWork
    num_tokens: int
    per_head: list[Subset] = field(default_factory=list)
    biased: list[QueryBatch] = field(default_factory=list)
    uncompressed: Subset | None = None


class CompressedBackend:
    """Mixed into a backend of vLLM, whose cache is then block-major, and heads may own pages.

    Attributes:
        compression: of this worker; set by it before any layer exists.
        impl_class: computes attention.
        builder_class: builds its metadata.
    """

    compression: ClassVar[WorkerCompression]
    impl_class: ClassVar[type]
    builder_class: ClassVar[type]

    @classmethod
    def get_impl_cls(cls) -> type:
        """As `impl_class`."""
        return cls.impl_class

    @classmethod
    def get_builder_cls(cls) -> type:
        """As `builder_class`."""
        return cls.builder_class

    @classmethod
    def page_pool(cls, layers: list[Any], spec: AttentionSpec) -> PagePool:
        """The page view over the caches of a cache group's layers.

        Raises:
            UnsupportedError: the kernels take other blocks, or order what is in a page in a way
                that is not known.
        """
        raise NotImplementedError

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A page of any layer and head must be reachable from any block: block-major only."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """What is kept of a request follows from sums whose order is not fixed."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Marks plain full-attention layers as compressed, and others as dependent on them."""
        spec = super().customize_spec(spec)
        if not is_compressible(spec):
            return dependent_on_compressed(spec)
        compression = CompressedBackend.compression
        return CompressedAttentionSpec.from_full_attention(
            spec, compression.settings, compression.demands(spec)
        )


class CompressedBuilder:
    """Builds, once per step and cache group, what its layers share; mixed into vLLM's builder.

    Attributes:
        supports_update_block_table: whether another cache group's metadata would do, with this
            one's block table in it; not while it holds that group's compressed requests.
    """

    supports_update_block_table = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._counting: Tensor | None = None

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Of steps of single tokens, where one kernel takes all requests; layers of other cache
        groups are vLLM's own."""
        if CompressedBackend.compression.reason_for_pieces is not None:
            return AttentionCGSupport.NEVER
        if isinstance(kv_cache_spec, CompressedAttentionSpec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build_all(self, common: CommonAttentionMetadata) -> Any:
        """vLLM's metadata of all requests, though some are compressed."""
        return super().build(0, common)

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """Fields of vLLM's metadata that differ for sequences of one KV head.

        Args:
            num_rows: queries of all sequences, of `queries_per_kv` heads each.
            queries_per_kv: query heads per KV head.
            head_size: elements of each.
        """
        return {}

    def layer_fields(self, batch: ResidentBatch, query_start_loc: Tensor) -> list[dict[str, Any]]:
        """Fields of vLLM's metadata that differ for each layer's compressed requests."""
        return [{"seq_lens": lengths, "block_table": pages} for pages, lengths in batch.layers]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's own metadata, with ours on it where anything is compressed or about to be."""
        compression = CompressedBackend.compression
        work = compression.prepare(self.layer_names[0], common_attn_metadata)
        if work is not None and work.decodes:  # nobody reads a schedule of vLLM's kernels
            metadata = super().build(0, common_attn_metadata, fast_build=True)
        elif work is None or not work.compressed:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        else:
            metadata = self.build_all(common_attn_metadata)
        if work is not None:
            compressed = self._compressed(work, metadata, common_attn_metadata)
            setattr(metadata, _ATTRIBUTE, compressed)
        return metadata

    def _compressed(
        self, work: StepWork, metadata: Any, common: CommonAttentionMetadata
    ) -> CompressedMetadata:
        """What goes along with vLLM's metadata of all requests."""
        found = CompressedMetadata(work, common.num_actual_tokens)
        if work.decodes:
            return found
        starts = common.query_start_loc_cpu.numpy()
        for batch in work.compressed:
            self._add(found, batch, metadata, common, starts)
        if work.compressed:
            found.uncompressed = self._uncompressed(work.compressed[0], common, starts)
        return found

    def _add(
        self,
        found: CompressedMetadata,
        batch: ResidentBatch,
        metadata: Any,
        common: CommonAttentionMetadata,
        starts: HostNumbers,
    ) -> None:
        """Compressed requests that share a table, by what attends for them."""
        rest: ResidentBatch | None = batch
        group = CompressedBackend.compression.group_of_layer[self.layer_names[0]]
        if group.readers is not None:
            readings, rest = group.readers.split(batch)
            for reading in readings:
                part = self.per_head(reading.batch, metadata, common, starts, reading)
                found.per_head.append(part)
        elif CompressedBackend.compression.takes_own_kernels(batch.seq_lens.shape[1]):
            found.biased += query_batches(batch, starts)
            return
        if rest is not None:
            found.per_head.append(self.per_head(rest, metadata, common, starts))

    def per_head(
        self,
        batch: ResidentBatch,
        metadata: Any,
        common: CommonAttentionMetadata,
        starts: HostNumbers,
        reading: SparseRead | None = None,
    ) -> Subset:
        """Compressed requests: a sequence per (request, head), in that order."""
        spec = self.kv_cache_spec
        num_heads, num_sequences = spec.num_kv_heads, batch.seq_lens.shape[1]
        num_rows, longest, where = num_sequences, 1, EVERY_ROW
        if common.max_query_len == 1 and len(batch.rows) == common.num_reqs:
            query_start_loc = self._count_to(num_sequences)
        else:
            rows, own_starts = sequences(starts, batch.rows, num_heads)
            where, query_start_loc = row_index(rows, self.device), upload(own_starts, self.device)
            num_rows, longest = len(rows), int(np.diff(own_starts).max())
        queries_per_kv = CompressedBackend.compression.num_query_heads // num_heads
        per_head = replace(
            metadata,
            num_actual_tokens=num_rows,
            max_query_len=longest,
            query_start_loc=query_start_loc,
            max_seq_len=batch.page_table.shape[2] * spec.block_size,
            **self.per_head_fields(num_rows, queries_per_kv, spec.head_size),
        )
        return Subset(per_head, where, self.layer_fields(batch, query_start_loc), reading)

    def _uncompressed(
        self, batch: ResidentBatch, common: CommonAttentionMetadata, starts: HostNumbers
    ) -> Subset | None:
        """The uncompressed requests of a mixed batch."""
        rows = batch.uncompressed
        if len(rows) == 0:
            return None
        tokens, own_starts = sequences(starts, rows)
        where, there = row_index(tokens, self.device), batch.device_uncompressed
        mine = replace(
            common,
            query_start_loc=upload(own_starts, self.device),
            query_start_loc_cpu=torch.from_numpy(own_starts),
            seq_lens=common.seq_lens[there],
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[torch.from_numpy(rows)],
            num_reqs=len(rows),
            num_actual_tokens=len(tokens),
            max_query_len=int(np.diff(own_starts).max()),
            block_table_tensor=common.block_table_tensor[there],
            slot_mapping=common.slot_mapping[where],
        )
        return Subset(super().build(0, mine), where)

    def _count_to(self, number: int) -> Tensor:
        """[number + 1] int32: 0, 1, 2 and so on."""
        if self._counting is None or len(self._counting) <= number:
            self._counting = torch.arange(2 * number + 1, dtype=torch.int32, device=self.device)
        return self._counting[: number + 1]


class CompressedImpl:
    """vLLM's implementation for uncompressed requests, and for compressed ones the same per head.

    Attributes:
        per_head_class: vLLM's implementation.
    """

    per_head_class: ClassVar[type]

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args, **kwargs
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        # Policies score with queries as the model has them, also where the cache is in fp8.
        self.supports_quant_query_input = False
        self._per_head: Any = None
        if getattr(self, "sinks", None) is None:  # else the layer is refused, in one sentence
            self._per_head = self.per_head_class(
                num_heads // num_kv_heads, head_size, scale, 1, *args, **kwargs
            )

    def fused_output_quant_supported(self, *args, **kwargs) -> bool:
        """Outputs of two calls are put together in the model's own type."""
        return False

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales,
        **more,
    ) -> Tensor:
        """Attention of one layer, and after it the layer's share of every compression event."""
        compressed = getattr(attn_metadata, _ATTRIBUTE, None)
        work = None if compressed is None else compressed.work
        if work is None or not (work.compressed or work.decodes):
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more
            )
        if work is None:
            return output
        group = CompressedBackend.compression.group_of_layer[layer.layer_name]
        index = group.layer_index[layer.layer_name]
        rows, out_rows, number = query, output, compressed.num_tokens
        if len(rows) != number:  # others pad the step
            rows, out_rows = rows[:number], out_rows[:number]
        group.begin_layer(work, index)
        if work.decodes:
            group.decode_steps.run(index, rows, out_rows)
        for subset in compressed.per_head:
            self.attend_per_head(layer, subset, index, group, rows, out_rows)
        for batch in compressed.biased:
            biased_attention(group.runner, index, batch, rows, out_rows, self.scale)
        if compressed.uncompressed is not None:
            subset = compressed.uncompressed
            with selected_rows(subset.where, rows, out_rows) as (mine, written):
                super().forward(layer, mine, mine, mine, kv_cache, subset.metadata, written)
        group.finish_layer(work, index, attn_metadata, rows, out_rows)
        return output

    def attend_per_head(
        self,
        layer,
        subset: Subset,
        index: int,
        group: GroupCompression,
        rows: Tensor,
        out_rows: Tensor,
    ) -> None:
        """Attention of the compressed requests: heads as sequences over the flat page array.

        Args:
            layer: vLLM's.
            subset: the requests.
            index: of the layer in its cache group.
            group: that cache group.
            rows, out_rows: [tokens, num_heads, head_size] queries and outputs of all requests.
        """
        for name, value in subset.by_layer[index].items():
            setattr(subset.metadata, name, value)
        pool, reading = group.tables.pool, subset.reading
        cache = pool.cache_of_one_head
        shape = (-1, self.num_heads // self.num_kv_heads, self.head_size)
        heads = rows.reshape(shape), out_rows.view(shape)
        with selected_rows(subset.where, *heads) as (mine, written):
            if reading is not None:
                subset.metadata.block_table = reading.choose(index, mine, group.readers)
            # Keys and values are in the cache already; what stands here for them is not read.
            self._per_head.forward(layer, mine, mine, mine, cache, subset.metadata, written)
