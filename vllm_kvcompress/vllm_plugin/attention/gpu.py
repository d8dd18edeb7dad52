"""Attention on GPUs: one of vLLM's own backends, called once more for compressed requests.

For those, every (request, KV head) is a sequence of its own with the G query heads of its group
and one KV head, so that heads may own any pages, as many as they like. The backend's own kernels
then take the flat page array for a cache of one head. The classes here are mixed into vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.attention.biased import QueryGroup, biased_attention, query_groups
from vllm_kvcompress.attention.query_rows import EVERY_ROW, Places, places, rows_at
from vllm_kvcompress.cache.pages import InterleavedPagePool, PagePool, flat_pages
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.kernels.transfers import upload
from vllm_kvcompress.vllm_plugin.attention.sequences import sequences
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    dependent_on_compressed,
    is_compressible,
)
from vllm_kvcompress.vllm_plugin.step import GroupStep
from vllm_kvcompress.vllm_plugin.worker_state import WorkerState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

_ATTRIBUTE = "kvcompress"  # of vLLM's metadata


@dataclass
class Subset:
    """Some of a step's requests, as vLLM's backend wants them.

    Attributes:
        metadata: vLLM's own, for these requests alone.
        where: [T] rows of the queries that belong to them.
    """

    metadata: Any
    where: Places


@dataclass
class CompressedStep:
    """What compression does in a step; travels on vLLM's metadata.

    Compressed requests are in `ragged`, or in `gathered` if the policy's attention needs more than
    vLLM's kernels give.

    Attributes:
        step: events, and the compressed requests (step.batch None: every request is whole).
        num_tokens: of the step, without what pads it to a CUDA graph's size.
        seq_lens, tables: per layer [S] int32 resident lengths and [S, width] int32 pages.
    """

    step: GroupStep
    num_tokens: int
    ragged: Subset | None = None
    gathered: list[QueryGroup] | None = None
    whole: Subset | None = None
    seq_lens: tuple[Tensor, ...] = ()
    tables: tuple[Tensor, ...] = ()


class CompressedGPUBackend:
    """Mixed into a backend of vLLM.

    Attributes:
        state: this worker's state; set by the worker before any layer exists.
    """

    state: ClassVar[WorkerState]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry that is for backends from outside."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A page of any layer and head must be reachable from any block: block-major only."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def scratch_bytes(cls, vllm_config: VllmConfig) -> int:
        """What vLLM's kernels may take for a moment, for compressed requests, on one rank."""
        return 0

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
        state = CompressedGPUBackend.state
        return CompressedAttentionSpec.from_full_attention(
            spec, state.settings, state.demands(spec)
        )


class CompressedGPUBuilder:
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
    def get_cudagraph_support(cls, *args, **kwargs) -> AttentionCGSupport:
        """Attention runs between the graphs: which requests are compressed changes by the step."""
        return AttentionCGSupport.NEVER

    def ragged_changes(self, num_rows: int, group: int, head_size: int) -> dict[str, Any]:
        """Fields of vLLM's metadata that differ for sequences of one KV head.

        Args:
            num_rows: queries of all sequences, of `group` heads each.
            group: query heads per KV head.
            head_size: elements of each.
        """
        raise NotImplementedError

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's own metadata, with ours on it where anything is compressed or about to be."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        state = CompressedGPUBackend.state
        group = state.group_of(self.layer_names)
        step = None if group is None else state.prepare(group, common_attn_metadata)
        if step is not None:
            compressed = self._compressed(step, metadata, common_attn_metadata, state)
            setattr(metadata, _ATTRIBUTE, compressed)
        return metadata

    def _compressed(
        self,
        step: GroupStep,
        metadata: Any,
        common: CommonAttentionMetadata,
        state: WorkerState,
    ) -> CompressedStep:
        batch, num_tokens = step.batch, common.num_actual_tokens
        if batch is None:
            return CompressedStep(step, num_tokens)
        starts = common.query_start_loc_cpu.numpy()
        whole = self._whole(batch, common, starts)
        if state.attends(batch.seq_lens.shape[1]):
            gathered = query_groups(batch, starts)
            return CompressedStep(step, num_tokens, gathered=gathered, whole=whole)
        return CompressedStep(
            step,
            num_tokens,
            ragged=self.by_head(batch, metadata, common, starts),
            whole=whole,
            seq_lens=batch.seq_lens.unbind(),
            tables=batch.page_table.unbind(),
        )

    def by_head(
        self, batch: ResidentBatch, metadata: Any, common: CommonAttentionMetadata, starts
    ) -> Subset:
        """Compressed requests: a sequence per (request, head), in that order."""
        spec = self.kv_cache_spec
        num_heads, num_sequences = spec.num_kv_heads, batch.seq_lens.shape[1]
        num_tokens, longest, where = num_sequences, 1, EVERY_ROW
        if common.max_query_len == 1 and len(batch.whole) == 0:
            query_start_loc = self._count_to(num_sequences)
        else:
            rows, own_starts = sequences(starts, batch.rows, num_heads)
            where, query_start_loc = places(rows, self.device), upload(own_starts, self.device)
            num_tokens, longest = len(rows), int(np.diff(own_starts).max())
        group = CompressedGPUBackend.state.num_query_heads // num_heads
        ragged = replace(
            metadata,
            num_actual_tokens=num_tokens,
            max_query_len=longest,
            query_start_loc=query_start_loc,
            max_seq_len=batch.page_table.shape[2] * spec.block_size,
            **self.ragged_changes(num_tokens, group, spec.head_size),
        )
        return Subset(ragged, where)

    def _whole(
        self, batch: ResidentBatch, common: CommonAttentionMetadata, starts
    ) -> Subset | None:
        """The uncompressed requests of a mixed batch."""
        rows = batch.whole
        if len(rows) == 0:
            return None
        tokens, own_starts = sequences(starts, rows)
        where, there = places(tokens, self.device), batch.device_whole
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


class CompressedGPUImpl:
    """vLLM's implementation for uncompressed requests, and for compressed ones the same per head.

    Attributes:
        per_head_class: vLLM's implementation.
    """

    per_head_class: ClassVar[type]

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *args, **kwargs
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
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
        if compressed is None or compressed.step.batch is None:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more
            )
        if compressed is None:
            return output
        state = CompressedGPUBackend.state
        group = state.groups[state.group_of([layer.layer_name])]
        index, step = group.layer_index[layer.layer_name], compressed.step
        shape = (-1, self.num_heads, self.head_size)
        rows = query.view(shape)[: compressed.num_tokens]
        out_rows = output.view(shape)[: compressed.num_tokens]
        if step.batch is not None:
            if compressed.gathered is not None:
                for some in compressed.gathered:
                    biased_attention(group.runner, index, some, rows, out_rows, self.scale)
            else:
                self.attend_by_head(layer, compressed, index, group.tables.pool, rows, out_rows)
            if compressed.whole is not None:
                self._whole(layer, compressed.whole, kv_cache, rows, out_rows)
        group.finish_layer(step, index, attn_metadata, rows, out_rows, self.scale)
        return output

    def attend_by_head(
        self,
        layer,
        compressed: CompressedStep,
        index: int,
        pool: PagePool,
        rows: Tensor,
        out_rows: Tensor,
    ) -> None:
        """Attention of the compressed requests: heads as sequences over the flat page array."""
        subset = compressed.ragged
        subset.metadata.seq_lens = compressed.seq_lens[index]
        subset.metadata.block_table = compressed.tables[index]
        cache = pool.pages.view(-1, 1, pool.block_size, 2 * pool.head_size)
        shape = (-1, self.num_heads // self.num_kv_heads, self.head_size)
        forward = self._per_head.forward
        _attend(forward, layer, subset, cache, rows.reshape(shape), out_rows.view(shape))

    def _whole(
        self, layer, subset: Subset, kv_cache: Tensor, rows: Tensor, out_rows: Tensor
    ) -> None:
        """Attention of the uncompressed requests of a mixed batch."""
        _attend(super().forward, layer, subset, kv_cache, rows, out_rows)


def page_pool(layers, spec: AttentionSpec) -> PagePool:
    """The page view over the caches of a group's layers.

    Raises:
        UnsupportedError: the backend's kernels take other blocks, or order tokens otherwise.
    """
    caches = [layer.kv_cache for layer in layers]
    if caches[0].shape[2] != spec.block_size:
        raise UnsupportedError(
            f"this attention kernel takes blocks of {caches[0].shape[2]} tokens, and the cache has "
            f"blocks of {spec.block_size}; start with --block-size {caches[0].shape[2]}."
        )
    check_rows(layers[0], spec)
    pages, pages_per_block, offsets = flat_pages(caches)
    return InterleavedPagePool(
        pages=pages,
        pages_per_block=pages_per_block,
        layer_offsets=upload(offsets, pages.device),
        num_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        head_size=spec.head_size,
    )


def check_rows(layer, spec: AttentionSpec) -> None:
    """Refuses kernels that store anything but rows of [key, value] in a page.

    A probe goes through the backend's own cache-write op into a page of its own.

    Raises:
        UnsupportedError: they do.
    """
    size, head_size = spec.block_size, spec.head_size
    device = layer.kv_cache.device
    shape = (1, spec.num_kv_heads, size, 2 * head_size)
    page = torch.zeros(shape, dtype=spec.dtype, device=device)
    rows = torch.randn((size, spec.num_kv_heads, 2 * head_size), device=device).to(spec.dtype)
    keys, values = rows.split(head_size, dim=-1)
    slots = torch.arange(size, device=device)
    layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), page, slots)
    if not torch.equal(page[0].transpose(0, 1), rows):
        raise UnsupportedError(
            "this attention kernel stores pages in an order that is not known; compressing would "
            "destroy them. Serve without --kv-policy, or with another --dtype."
        )


def _attend(
    forward: Callable[..., Any],
    layer,
    subset: Subset,
    cache: Tensor,
    rows: Tensor,
    out_rows: Tensor,
) -> None:
    """vLLM's attention over the sequences of `subset`; writes their rows of the output."""
    with rows_at(subset.where, rows, out_rows) as (query, output):
        # Keys and values are in the cache already; what stands here for them is not read.
        forward(layer, query, query, query, cache, subset.metadata, output)
