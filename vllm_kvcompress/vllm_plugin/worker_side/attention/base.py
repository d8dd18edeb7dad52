"""Attention of compressed requests on any backend of vLLM: its kernels called again, per head.

Every (request, KV head) is a sequence of its own for the backend's kernels, with one KV head and
the query heads that share it, so that heads may own any pages, as many as they like. The kernels
see the flat page array as a cache of one head. The classes here are mixed into a backend's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvcompress.attention.batch import (
    EVERY_ROW,
    HostNumbers,
    ResidentBatch,
    RowIndex,
    row_index,
    selected_rows,
)
from vllm_kvcompress.attention.biased import QueryBatch, biased_attention, query_batches
from vllm_kvcompress.attention.reading import SparseRead
from vllm_kvcompress.cache.pages import FlatPages, Integers, PagePool
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    dependent_on_compressed,
    is_compressible,
    part_size,
)
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression, StepWork
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

_ATTRIBUTE = "kvcompress"  # on vLLM's metadata, holds a `CompressedMetadata`
MIN_RUN_TOKENS = 2  # of consecutive requests that are worth a call of their own


@dataclass
class Subset:
    """Some of a step's requests, in the form that vLLM's backend takes.

    Attributes:
        metadata: vLLM's own, for these requests alone.
        where: [T] rows of the queries that belong to them.
        by_layer: metadata fields to set before each layer; empty: the same in all layers.
        reading: which part of their pages they read; None: all.
    """

    metadata: Any
    where: RowIndex
    by_layer: list[dict[str, Any]] = field(default_factory=list)
    reading: SparseRead | None = None


@dataclass
class CompressedMetadata:
    """A cache group's work in a step; travels on vLLM's metadata.

    Attributes:
        work: events and compressed requests.
        num_tokens: tokens of the step, without the padding to a CUDA graph's size.
        per_head: compressed requests for vLLM's kernels: those that read all of their pages, and
            those that read a part.
        biased: compressed requests for this package's kernels.
        uncompressed: the uncompressed requests of a mixed batch; empty: there are none, or all
            requests are uncompressed.
    """

    work: StepWork
    num_tokens: int
    per_head: list[Subset] = field(default_factory=list)
    biased: list[QueryBatch] = field(default_factory=list)
    uncompressed: list[Subset] = field(default_factory=list)


def compressed_of(metadata: Any) -> CompressedMetadata | None:
    """Returns a cache group's work in a step from vLLM's metadata; None: there is none."""
    compressed: CompressedMetadata | None = getattr(metadata, _ATTRIBUTE, None)
    return compressed


def cache_of(layer: Any, kv_cache: Tensor) -> Tensor:
    """Returns a layer's cache, in the parts of blocks where these are divided.

    The layer stays bound to whole blocks, which vLLM zeroes by their number.
    """
    return CompressedBackend.compression.caches.get(layer.layer_name, kv_cache)


class CompressedBackend(AttentionBackend):
    """A backend of vLLM with a block-major cache, whose pages any head may own.

    Attributes:
        compression: the worker's; set before any layer exists.
        impl_class: computes attention.
        builder_class: builds its metadata.
    """

    compression: ClassVar[WorkerCompression]
    impl_class: ClassVar[type]
    builder_class: ClassVar[type]

    @classmethod
    def get_impl_cls(cls) -> type:
        """Returns `impl_class`, as vLLM asks for it."""
        return cls.impl_class

    @classmethod
    def get_builder_cls(cls) -> type:
        """Returns `builder_class`, as vLLM asks for it."""
        return cls.builder_class

    @classmethod
    def page_pool(cls, layers: list[Any], caches: list[Tensor], spec: AttentionSpec) -> PagePool:
        """Lays a page view over the caches of a cache group's layers.

        Args:
            layers: the layers.
            caches: [num_blocks, num_kv_heads, block_size, elements of a token] cache of each.
            spec: their spec, for the blocks of `caches`.

        Raises:
            UnsupportedError: the kernels take another block size, or their order of elements in a
                page is not known.
        """
        raise NotImplementedError

    @classmethod
    def pool_over(cls, layers: list[Any], spec: AttentionSpec, flat: FlatPages) -> PagePool:
        """Makes the `PagePool` of some layers, in the order of elements that their kernels have.

        `layers` and `spec` are as in `page_pool`.
        """
        raise NotImplementedError

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Asks for block-major only: any layer and head must reach its page from any block."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Says no: kept tokens follow from sums whose order is not fixed."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Marks plain full-attention layers as compressed, and others as dependent on them."""
        spec = super().customize_spec(spec)
        if not is_compressible(spec):
            return dependent_on_compressed(spec)
        compression, size = CompressedBackend.compression, 0
        if compression.vllm_config.model_config.is_hybrid:
            size = part_size(spec.block_size, cls.get_supported_kernel_block_sizes(spec))
        split = spec.block_size // (size or spec.block_size)
        of_kernels = spec.copy_with_new_block_size(spec.block_size // split)
        return CompressedAttentionSpec.from_full_attention(
            spec, compression.settings, compression.demands(of_kernels, split), size
        )


class CompressedBuilder(AttentionMetadataBuilder[Any]):
    """Builds the metadata that a cache group's layers share in a step.

    Attributes:
        supports_update_block_table: vLLM may reuse another cache group's metadata with this one's
            block table; never here, since it holds that group's compressed requests.
    """

    supports_update_block_table = False

    def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
        self._num_parts = 1
        if isinstance(kv_cache_spec, CompressedAttentionSpec):
            self._num_parts, kv_cache_spec = kv_cache_spec.split, kv_cache_spec.of_kernels
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._counting: Tensor | None = None
        self._kernel_table: Tensor | None = None

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Allows full graphs of decode steps where one kernel takes all requests.

        Layers of uncompressed cache groups allow what vLLM's builder does.
        """
        if CompressedBackend.compression.reason_for_pieces is not None:
            return AttentionCGSupport.NEVER
        if isinstance(kv_cache_spec, CompressedAttentionSpec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        support: AttentionCGSupport = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return support

    def build_all(self, common: CommonAttentionMetadata) -> Any:
        """Builds vLLM's metadata of all requests, compressed ones included."""
        return super().build(0, common)

    def per_head_fields(self, num_rows: int, queries_per_kv: int, head_size: int) -> dict[str, Any]:
        """Returns fields of vLLM's metadata that differ for sequences of one KV head.

        The sequences have `num_rows` queries in all, of `queries_per_kv` heads each.
        """
        return {}

    def layer_fields(self, batch: ResidentBatch, query_start_loc: Tensor) -> list[dict[str, Any]]:
        """Returns, by layer, fields of vLLM's metadata that differ for compressed requests."""
        return [{"seq_lens": lengths, "block_table": pages} for pages, lengths in batch.layers]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Builds vLLM's metadata, with ours on it if the step has work for compression."""
        compression = CompressedBackend.compression
        common_attn_metadata = self.in_kernel_blocks(common_attn_metadata)
        work = compression.prepare(self.layer_names[0], common_attn_metadata)
        if work is not None and work.decodes:  # no schedule: vLLM's kernels do not run
            metadata = super().build(0, common_attn_metadata, fast_build=True)
        elif work is None or not work.compressed:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        else:
            # Compressed requests read no tokens that see later ones: images come before events.
            metadata = self.build_all(replace(common_attn_metadata, mm_req_doc_ranges=None))
        if work is not None:
            compressed = self._build_compressed(work, metadata, common_attn_metadata)
            setattr(metadata, _ATTRIBUTE, compressed)
        return metadata

    def in_kernel_blocks(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Returns metadata whose block table has the parts of blocks, where these are divided.

        Slots of tokens are the same. The table stays where it is, since CUDA graphs may read it.
        """
        if self._num_parts == 1:
            return common
        blocks = common.block_table_tensor
        (rows, columns), split = blocks.shape, self._num_parts
        table = self._kernel_table
        if table is None or len(table) < rows or table.shape[1] != columns * split:
            num_rows = rows if table is None else max(rows, 2 * len(table))
            table = self._kernel_table = blocks.new_empty((num_rows, columns * split))
        parts = torch.arange(split, dtype=blocks.dtype, device=blocks.device)
        into = table[:rows]
        torch.add(parts, blocks[:, :, None], alpha=split, out=into.view(rows, columns, split))
        return replace(common, block_table_tensor=into)

    def build_draft(self, common: CommonAttentionMetadata, reads: list[SparseRead]) -> Any:
        """Builds vLLM's metadata of a draft step, whose requests all read a part."""
        metadata, starts = self.build_all(common), common.query_start_loc_cpu.numpy()
        work = StepWork(compressed=[read.batch for read in reads])
        parts = [self.per_head(read.batch, metadata, common, starts, read) for read in reads]
        setattr(
            metadata, _ATTRIBUTE, CompressedMetadata(work, common.num_actual_tokens, per_head=parts)
        )
        return metadata

    def _build_compressed(
        self, work: StepWork, metadata: Any, common: CommonAttentionMetadata
    ) -> CompressedMetadata:
        """Splits a step's requests by what attends for them."""
        compressed = CompressedMetadata(work, common.num_actual_tokens)
        if work.decodes:
            return compressed
        starts = common.query_start_loc_cpu.numpy()
        for batch in work.compressed:
            self._add(compressed, batch, metadata, common, starts)
        if work.compressed:
            *rest, last = longest_run_last(work.compressed[0].uncompressed, starts)
            # A schedule for each call would be kept in one buffer.
            parts = [self._uncompressed(rows, common, starts, fast_build=True) for rows in rest]
            if len(last):
                parts.append(self._uncompressed(last, common, starts))
            compressed.uncompressed = parts
        return compressed

    def _add(
        self,
        compressed: CompressedMetadata,
        batch: ResidentBatch,
        metadata: Any,
        common: CommonAttentionMetadata,
        starts: HostNumbers,
    ) -> None:
        """Adds compressed requests that share a page table."""
        rest: ResidentBatch | None = batch
        group = CompressedBackend.compression.group_of_layer[self.layer_names[0]]
        if group.readers is not None:
            readings, rest = group.readers.split(batch)
            for reading in readings:
                part = self.per_head(reading.batch, metadata, common, starts, reading)
                compressed.per_head.append(part)
        elif CompressedBackend.compression.takes_own_kernels(batch.seq_lens.shape[1]):
            compressed.biased += query_batches(batch, starts)
            return
        if rest is not None:
            compressed.per_head.append(self.per_head(rest, metadata, common, starts))

    def per_head(
        self,
        batch: ResidentBatch,
        metadata: Any,
        common: CommonAttentionMetadata,
        starts: HostNumbers,
        reading: SparseRead | None = None,
    ) -> Subset:
        """Makes a sequence of every (request, head), in that order."""
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
        self,
        rows: Integers,
        common: CommonAttentionMetadata,
        starts: HostNumbers,
        fast_build: bool = False,
    ) -> Subset:
        """Builds vLLM's metadata of some of a mixed batch's uncompressed requests."""
        tokens, own_starts = sequences(starts, rows)
        where, device_rows = row_index(tokens, self.device), row_index(rows, self.device)
        images = common.mm_req_doc_ranges  # whose tokens see each other, by row
        if images is not None:
            images = {index: images[row] for index, row in enumerate(rows.tolist())}
        subset = replace(
            common,
            query_start_loc=upload(own_starts, self.device),
            query_start_loc_cpu=torch.from_numpy(own_starts),
            seq_lens=common.seq_lens[device_rows],
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[torch.from_numpy(rows)],
            num_reqs=len(rows),
            num_actual_tokens=len(tokens),
            max_query_len=int(np.diff(own_starts).max()),
            block_table_tensor=common.block_table_tensor[device_rows],
            slot_mapping=common.slot_mapping[where],
            mm_req_doc_ranges=images,
        )
        return Subset(super().build(0, subset, fast_build), where)

    def _count_to(self, number: int) -> Tensor:
        """Returns [number + 1] int32 0, 1, 2, ..., cached."""
        if self._counting is None or len(self._counting) <= number:
            self._counting = torch.arange(2 * number + 1, dtype=torch.int32, device=self.device)
        return self._counting[: number + 1]


class CompressedImpl(AttentionImpl[Any]):
    """vLLM's attention for uncompressed requests, and the same per head for compressed ones.

    Attributes:
        per_head_class: vLLM's implementation, built again for one KV head.
        mean_key: [H, D] mean that is subtracted from keys before a quantized cache stores them;
            None: keys are stored whole.
    """

    per_head_class: ClassVar[type]
    mean_key: Tensor | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        num_kv_heads = num_kv_heads or num_heads
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        # Policies score with queries of the model's type, even if the cache is in fp8.
        self.supports_quant_query_input = False
        self._per_head: Any = None
        needs_own = self.alibi_slopes is not None or getattr(self, "sinks", None) is not None
        if not needs_own:  # otherwise this package's kernels attend
            self._per_head = self.per_head_class(
                num_heads // num_kv_heads, head_size, scale, 1, *args, **kwargs
            )

    def fused_output_quant_supported(self, *args: Any, **kwargs: Any) -> bool:
        """Says no: outputs of two calls are put together in the model's own type."""
        return False

    def stored(self, layer: Any, key: Tensor, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [T, H, D] new keys less the mean key, and the cache in parts of its blocks."""
        key = key if self.mean_key is None else key - self.mean_key
        return key, cache_of(layer, kv_cache)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Computes a layer's attention, then the layer's part of every compression event."""
        kv_cache = cache_of(layer, kv_cache)
        compressed = compressed_of(attn_metadata)
        if compressed is None or not (compressed.work.compressed or compressed.work.decodes):
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales, **kwargs
            )
        if compressed is None:
            return output
        work = compressed.work
        group = CompressedBackend.compression.group_of_layer[layer.layer_name]
        index, window = group.numbers_of(layer.layer_name)
        rows, out_rows, number = query, output, compressed.num_tokens
        if len(rows) != number:  # the rest is padding
            rows, out_rows = rows[:number], out_rows[:number]
        group.begin_layer(work, index)
        if group.decode_steps is not None and work.decodes:
            group.decode_steps.run(index, rows, out_rows)
        for subset in compressed.per_head:
            self.attend_per_head(layer, subset, index, group, rows, out_rows)
        for batch in compressed.biased:
            biased_attention(group.runner, index, batch, rows, out_rows, self.scale)
        for subset in compressed.uncompressed:
            with selected_rows(subset.where, rows, out_rows) as (queries, outputs):
                # Keys and values are in the cache already; these arguments are not read.
                super().forward(
                    layer, queries, queries, queries, kv_cache, subset.metadata, outputs
                )
        group.finish_layer(work, index, attn_metadata, rows, out_rows, window)
        return output

    def attend_per_head(
        self,
        layer: Any,
        subset: Subset,
        index: int,
        group: GroupCompression,
        rows: Tensor,
        out_rows: Tensor,
    ) -> None:
        """Runs vLLM's kernels for compressed requests: heads are sequences over the page array.

        `rows` and `out_rows` are [tokens, num_heads, head_size] queries and outputs of all
        requests; `index` is the layer's number in its cache group.
        """
        for name, value in subset.by_layer[index].items():
            setattr(subset.metadata, name, value)
        pool, reading = group.tables.pool, subset.reading
        cache = pool.cache_of_one_head
        shape = (-1, self.num_heads // self.num_kv_heads, self.head_size)
        heads, out_heads = rows.reshape(shape), out_rows.view(shape)
        with selected_rows(subset.where, heads, out_heads) as (queries, outputs):
            if reading is not None:
                subset.metadata.block_table = reading.choose(index, queries)
            # Keys and values are in the cache already; these arguments are not read.
            self._per_head.forward(
                layer, queries, queries, queries, cache, subset.metadata, outputs
            )


def longest_run_last(rows: Integers, starts: HostNumbers) -> list[Integers]:
    """Splits requests into others and a run of consecutive ones with many tokens, if there is one.

    The rows of consecutive requests lie one behind the other: attention needs no copies of them.
    A step's prefills are such a run, behind requests that generate.

    Args:
        rows: [R] int64 numbers of requests, ascending.
        starts: [requests + 1] first token of every request of the step.

    Returns:
        All requests, or the others and the run.
    """
    ends = np.flatnonzero(np.diff(rows, append=-1) != 1)
    if len(ends) < 2:
        return [rows]
    firsts = np.concatenate([[0], ends[:-1] + 1])
    tokens = starts[rows[ends] + 1] - starts[rows[firsts]]
    longest = tokens.argmax()
    if tokens[longest] < MIN_RUN_TOKENS:
        return [rows]
    first, behind = firsts[longest], ends[longest] + 1
    return [np.delete(rows, slice(first, behind)), rows[first:behind]]


def sequences(
    starts: HostNumbers, rows: HostNumbers, num_heads: int = 1
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], HostNumbers]:
    """Returns the query rows of every sequence, and where each sequence begins among them.

    Args:
        starts: [requests + 1] first token of every request of the step.
        rows: [R] the requests.
        num_heads: sequences per request.

    Returns:
        [T] int64 rows of the step's queries, flattened to one row per token and head; and
        [R * num_heads + 1] int32 index of every sequence's first row in them.
    """
    lengths = np.diff(starts)[rows].repeat(num_heads)
    own_starts: HostNumbers = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=own_starts[1:])
    sequence: HostNumbers = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(sequence)) - own_starts[sequence]
    tokens = starts[rows].repeat(num_heads)[sequence] + offsets
    return (tokens * num_heads + sequence % num_heads).astype(np.int64), own_starts
