"""Attention on the CPU build: vLLM's own kernel, called once more for compressed requests.

For those, every (request, KV head) is a sequence of its own with the G query heads of its
group and one KV head, so that heads may own any pages, as many as they like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.attention.biased import QueryGroup, biased_attention, query_groups
from vllm_kvcompress.attention.query_rows import EVERY_ROW, Places, places, rows_at
from vllm_kvcompress.cache.page_order import Packing, find_packing
from vllm_kvcompress.cache.pages import PackedPagePool, PagePool, flat_pages
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.vllm_plugin.attention.sequences import HostNumbers, sequences
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    dependent_on_compressed,
    is_compressible,
)
from vllm_kvcompress.vllm_plugin.step import GroupStep
from vllm_kvcompress.vllm_plugin.worker_state import WorkerState

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

CPU = torch.device("cpu")


@dataclass
class Subset:
    """Some sequences of a batch, as the kernel wants them.

    Attributes:
        where: [T] rows of the flattened queries that belong to them.
        query_start_loc: [S + 1] int32.
        schedules: kernel schedules, one per layer or one for all.
    """

    where: Places
    query_start_loc: Tensor
    schedules: list[Tensor]


@dataclass
class CompressedCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata, plus what compression does in this step (None: nothing).

    Compressed requests are in `ragged`, or in `gathered` if the policy's attention needs more than
    vLLM's kernel gives.
    """

    step: GroupStep | None = None
    ragged: Subset | None = None
    gathered: list[QueryGroup] | None = None
    whole: Subset | None = None


class CompressedCPUAttentionBackend(CPUAttentionBackend):
    """CPU attention over a block-major cache, of which heads may own pages.

    Attributes:
        state: this worker's state; set by the worker before any layer exists.
    """

    state: ClassVar[WorkerState]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A page of any layer and head must be reachable from any block: block-major only."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Marks plain full-attention layers as compressed, and others as dependent on them."""
        if not is_compressible(spec):
            return dependent_on_compressed(spec)
        return CompressedAttentionSpec.from_full_attention(
            spec, cls.state.settings, cls.state.demands(spec)
        )

    @staticmethod
    def get_impl_cls() -> type[CompressedCPUAttentionImpl]:
        """The attention implementation."""
        return CompressedCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CompressedCPUMetadataBuilder]:
        """The metadata builder."""
        return CompressedCPUMetadataBuilder


class CompressedCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds, once per step and cache group, what its layers share."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """vLLM's own metadata unless a request of the batch is compressed or about to be."""
        state = CompressedCPUAttentionBackend.state
        group = state.group_of(self.layer_names)
        step = None if group is None else state.prepare(group, common_attn_metadata)
        if step is None or step.batch is None:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if step is None:
                return metadata
            return CompressedCPUMetadata(**vars(metadata), step=step)
        common = common_attn_metadata
        gathers, starts = state.gathers, common.query_start_loc_cpu.numpy()
        return CompressedCPUMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            step=step,
            ragged=None if gathers else self._ragged(step.batch, common, starts),
            gathered=query_groups(step.batch, starts) if gathers else None,
            whole=self._whole(step.batch, common, starts),
        )

    def _ragged(
        self, batch: ResidentBatch, common: CommonAttentionMetadata, starts: HostNumbers
    ) -> Subset:
        """Compressed requests: a sequence per (request, head), in that order."""
        num_heads = self.num_kv_heads
        where = EVERY_ROW
        if common.max_query_len == 1 and len(batch.whole) == 0:
            query_start_loc = torch.arange(batch.seq_lens.shape[1] + 1, dtype=torch.int32)
        else:
            rows, own_starts = sequences(starts, batch.rows, num_heads)
            where, query_start_loc = places(rows, CPU), torch.from_numpy(own_starts)
        schedules = [
            self._schedule(seq_lens, query_start_loc, self.num_heads // num_heads, 1)
            for seq_lens in batch.seq_lens[: 1 if batch.same_in_all_layers else None]
        ]
        return Subset(where, query_start_loc, schedules)

    def _whole(
        self, batch: ResidentBatch, common: CommonAttentionMetadata, starts: HostNumbers
    ) -> Subset | None:
        """The uncompressed requests of a mixed batch."""
        if len(batch.whole) == 0:
            return None
        tokens, own_starts = sequences(starts, batch.whole)
        query_start_loc = torch.from_numpy(own_starts)
        seq_lens = common.seq_lens[batch.device_whole]
        schedule = self._schedule(seq_lens, query_start_loc, self.num_heads, self.num_kv_heads)
        return Subset(places(tokens, CPU), query_start_loc, [schedule])

    def _schedule(
        self, seq_lens: Tensor, query_start_loc: Tensor, num_heads: int, num_kv_heads: int
    ) -> Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seq_lens.numel(),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=seq_lens,
            dtype=self.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class CompressedCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's implementation; for compressed requests the same kernel, per head."""

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer, and after it the layer's share of every compression event."""
        step = getattr(attn_metadata, "step", None)
        if step is None or step.batch is None:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if step is None:
            return output
        state = CompressedCPUAttentionBackend.state
        group = state.groups[state.group_of([layer.layer_name])]
        index = group.layer_index[layer.layer_name]
        if step.batch is not None:
            if attn_metadata.gathered is not None:
                self._gathered(attn_metadata, index, group.runner, query, output)
            else:
                self._ragged(attn_metadata, index, group.tables.pool, query, output)
            if attn_metadata.whole is not None:
                self._whole(attn_metadata, query, kv_cache, output)
        shape = (-1, self.num_heads, self.head_size)
        rows = query.view(shape)[: attn_metadata.num_actual_tokens]
        group.finish_layer(step, index, attn_metadata, rows, output.view(shape), self.scale)
        return output

    def _ragged(
        self, metadata: CompressedCPUMetadata, layer: int, pool: PagePool, query, output
    ) -> None:
        """Attention of the compressed requests: heads as sequences over the flat page array."""
        batch, subset = metadata.step.batch, metadata.ragged
        shape = (-1, self.num_queries_per_kv, self.head_size)
        rows = query[: metadata.num_actual_tokens].reshape(shape)
        out_rows = output[: metadata.num_actual_tokens].view(shape)
        cache = pool.pages.view(-1, 1, 2 * pool.block_size, self.head_size)
        schedule = subset.schedules[layer if len(subset.schedules) > 1 else 0]
        self._attend(
            rows, out_rows, cache, subset, batch.seq_lens[layer], batch.page_table[layer], schedule
        )

    def _gathered(
        self, metadata: CompressedCPUMetadata, layer: int, runner: EventRunner, query, output
    ) -> None:
        """Attention of the compressed requests with a bias per entry, or corrected outputs."""
        shape = (-1, self.num_heads, self.head_size)
        rows, out_rows = query.view(shape), output.view(shape)
        for group in metadata.gathered:
            biased_attention(runner, layer, group, rows, out_rows, self.scale)

    def _whole(self, metadata: CompressedCPUMetadata, query, kv_cache: Tensor, output) -> None:
        """Attention of the uncompressed requests of a mixed batch."""
        rows = metadata.step.batch.device_whole
        num_blocks, num_kv_heads, block_size, _ = kv_cache.size()
        shape = (-1, self.num_heads, self.head_size)
        self._attend(
            query[: metadata.num_actual_tokens].view(shape),
            output[: metadata.num_actual_tokens].view(shape),
            kv_cache.view(num_blocks, num_kv_heads, block_size * 2, -1),
            metadata.whole,
            metadata.seq_lens[rows],
            metadata.block_table[rows],
            metadata.whole.schedules[0],
        )

    def _attend(
        self,
        rows: Tensor,
        out_rows: Tensor,
        cache: Tensor,
        subset: Subset,
        seq_lens: Tensor,
        block_table: Tensor,
        schedule: Tensor,
    ) -> None:
        """One kernel call over the sequences of `subset`; writes their rows of the output."""
        key_cache, value_cache = cache.chunk(2, dim=2)
        with rows_at(subset.where, rows, out_rows) as (query, output):
            ops.cpu_attention_with_kv_cache(
                query=query,
                key_cache=key_cache,
                value_cache=value_cache,
                output=output,
                query_start_loc=subset.query_start_loc,
                seq_lens=seq_lens,
                scale=self.scale,
                causal=True,
                alibi_slopes=self.alibi_slopes,
                sliding_window=self.sliding_window,
                block_table=block_table,
                softcap=self.logits_soft_cap,
                scheduler_metadata=schedule,
                s_aux=self.sinks,
            )


def page_pool(layers, spec: AttentionSpec) -> PagePool:
    """The page view over the caches of a group's layers."""
    pages, pages_per_block, offsets = flat_pages([layer.kv_cache for layer in layers])
    key_packing, value_packing = probe_packings(layers[0], spec)
    return PackedPagePool(
        pages=pages,
        pages_per_block=pages_per_block,
        layer_offsets=torch.tensor(offsets),
        num_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        head_size=spec.head_size,
        key_packing=key_packing,
        value_packing=value_packing,
    )


def probe_packings(layer, spec: AttentionSpec) -> tuple[Packing, Packing]:
    """How this kernel orders keys and values inside a page, found by writing a probe.

    The probe goes through vLLM's own cache-write op into a page of its own, with a different
    bit pattern in every element.

    Raises:
        UnsupportedError: the kernel uses an order that is not known.
    """
    size, head_size = spec.block_size, spec.head_size
    integer = {2: torch.int16, 4: torch.int32}[spec.dtype.itemsize]
    codes = torch.arange(1, size * head_size + 1).to(integer)
    rows = codes.view(spec.dtype).view(size, 1, head_size)
    page = torch.zeros(1, 1, 2 * size, head_size, dtype=spec.dtype)
    keys, values = page.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(rows, rows.clone(), keys, values, torch.arange(size), layer.isa)
    packed = page.view(2, size * head_size).view(integer)
    expected = codes.view(size, head_size)
    return find_packing(packed[0], expected, "keys"), find_packing(packed[1], expected, "values")
