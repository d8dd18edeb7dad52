"""Attention of compressed requests in MLA layers, whose latent rows all query heads read.

A request has one page table per layer. vLLM's own decode kernel computes the attention of requests
that generate, over the flat page array. Chunks of a prompt behind a compressed context read its
pages with absorbed queries. The classes here are mixed into a backend's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.attention.batch import (
    CompressedRows,
    HostNumbers,
    ResidentBatch,
    row_index,
)
from vllm_kvcompress.attention.biased import QueryBatch, biased_attention, query_batches
from vllm_kvcompress.attention.latent import AbsorbedQueries, absorb
from vllm_kvcompress.cache.pages import FlatPages, Integers, LatentPagePool, PagePool, flat_pages
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.vllm_plugin.compat.layers import (
    calls_prefill_kernels,
    up_project,
    write_by_backend,
)
from vllm_kvcompress.vllm_plugin.compat.worker import host_lengths
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import (
    CompressedBackend,
    CompressedBuilder,
    Subset,
    cache_of,
    sequences,
)
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression, StepWork

Flags = np.ndarray[Any, np.dtype[np.bool_]]
_ATTRIBUTE = "kvcompress_latent"  # on vLLM's metadata, holds a `LatentStep`
_DECODES, _MANY = -1, 0  # in place of numbers of tokens


@dataclass
class LatentStep:
    """A cache group's work in a step; travels on vLLM's metadata.

    vLLM has requests with one token first (D of them), then all others.

    Attributes:
        work: events and compressed requests.
        is_split: whether the lists below have all requests; else vLLM's metadata does.
        decodes: some of the first D requests each, with rows among their D tokens.
        drafted: requests with equally many drafts to verify each, with rows behind those D.
        prompts: uncompressed requests that vLLM reads, with rows there; None: there are none.
        chunks: other requests behind a context, with rows there.
    """

    work: StepWork
    is_split: bool = False
    decodes: list[Subset] = field(default_factory=list)
    drafted: list[Subset] = field(default_factory=list)
    prompts: Subset | None = None
    chunks: list[QueryBatch] = field(default_factory=list)


class CompressedLatentBackend(CompressedBackend):
    """An MLA backend of vLLM with a block-major cache."""

    @classmethod
    def page_pool(cls, layers: list[Any], caches: list[Tensor], spec: AttentionSpec) -> PagePool:
        """Lays pages over the caches; each layer's implementation gets to know its layer."""
        for layer in layers:
            layer.impl.layer = layer
            if calls_prefill_kernels(layer):
                write_by_backend(layer)
        return cls.pool_over(layers, spec, flat_pages(caches))

    @classmethod
    def pool_over(cls, layers: list[Any], spec: AttentionSpec, flat: FlatPages) -> PagePool:
        """Makes a pool of pages of latent rows."""
        return LatentPagePool(
            pages=flat.pages,
            pages_per_block=flat.per_block,
            layer_offsets=upload(flat.layer_offsets, flat.pages.device),
            num_heads=1,
            block_size=spec.block_size,
            head_size=spec.head_size,
            value_size=layers[0].kv_lora_rank,
        )


class CompressedLatentBuilder(CompressedBuilder, MLACommonMetadataBuilder[Any]):
    """Splits a step's requests by what computes their attention.

    Attributes:
        reads_contexts: whether vLLM reads chunks of uncompressed prompts behind a context.
    """

    reads_contexts: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, *args, **kwargs)
        self.layer_names = layer_names  # which vLLM's MLA builders do not keep

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Builds vLLM's metadata, with ours on it if the step has work for compression."""
        compression = CompressedBackend.compression
        common = self.in_kernel_blocks(common_attn_metadata)
        work = compression.prepare(self.layer_names[0], common)
        starts = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1]
        num_queries = np.diff(starts)
        num_decodes = int((num_queries > 1).argmax()) if num_queries.max() > 1 else len(num_queries)
        behind_context: Flags = np.zeros(len(num_queries), dtype=np.bool_)
        if not self.reads_contexts:
            behind_context = host_lengths(common) > num_queries
            behind_context[:num_decodes] = False
        compressed = [] if work is None else work.compressed
        is_split = bool(compressed or behind_context.any())
        step = LatentStep(work or StepWork(), is_split)
        if not is_split:
            metadata = self.build_plain(common, common_prefix_len)
        else:
            metadata = self._build_whole(common, num_decodes, int(starts[num_decodes]))
            self._split(step, metadata, common, starts, behind_context)
        if work is not None or is_split:
            setattr(metadata, _ATTRIBUTE, step)
        return metadata

    def build_plain(self, common: CommonAttentionMetadata, common_prefix_len: int = 0) -> Any:
        """Builds vLLM's metadata of requests whose attention its own kernels compute."""
        return super(CompressedBuilder, self).build(common_prefix_len, common)

    def _build_whole(self, common: CommonAttentionMetadata, num_decodes: int, num_rows: int) -> Any:
        """Builds metadata of all requests, by which vLLM's layer tells decodes from the others."""
        decode = MLACommonDecodeMetadata(
            common.block_table_tensor[:num_decodes], common.seq_lens[:num_decodes], None
        )
        return MLACommonMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_rows,
            num_prefills=common.num_reqs - num_decodes,
            decode=decode,
        )

    def _split(
        self,
        step: LatentStep,
        metadata: Any,
        common: CommonAttentionMetadata,
        starts: HostNumbers,
        behind_context: Flags,
    ) -> None:
        """Fills the lists of a step.

        A row with as few tokens as drafts to verify may also be the end of a prompt: both read
        what is before them in the same way.
        """
        num_decodes = metadata.num_decodes
        behind = starts - starts[num_decodes]  # rows behind those of the decodes
        is_uncompressed = np.ones(common.num_reqs, dtype=np.bool_)
        number = np.diff(starts)  # of a row's tokens
        number[number > self.reorder_batch_threshold] = _MANY
        number[:num_decodes] = _DECODES
        for batch in step.work.compressed:
            is_uncompressed[batch.rows] = False
            for each in np.unique(number[batch.rows]):
                some = batch.take(number[batch.rows] == each)
                if each == _MANY:
                    step.chunks += query_batches(some, behind)
                elif each == _DECODES:
                    step.decodes.append(self.decodes(some, metadata))
                else:
                    subset = self.decodes(some, metadata)
                    step.drafted.append(self._behind(subset, some.rows, behind))
        rows = np.flatnonzero(is_uncompressed)
        for each in np.unique(number[rows[number[rows] != _MANY]]):
            equal = rows[number[rows] == each]
            subset = self._uncompressed(equal, common, starts)
            if each == _DECODES:
                step.decodes.append(subset)
            else:
                step.drafted.append(self._behind(subset, equal, behind))
        rows = rows[number[rows] == _MANY]
        for row in rows[behind_context[rows]]:
            step.chunks += query_batches(self._whole_context(row, common), behind)
        if len(prompts := rows[~behind_context[rows]]):
            subset = self._uncompressed(prompts, common, starts)
            step.prompts = self._behind(subset, prompts, behind)

    def _behind(self, subset: Subset, rows: Integers, behind: HostNumbers) -> Subset:
        """Counts the queries of a subset's requests, which are `rows`, behind those of decodes."""
        index, _ = sequences(behind, rows)
        return replace(subset, where=row_index(index, self.device))

    def decodes(self, batch: ResidentBatch, metadata: Any) -> Subset:
        """Makes a sequence of every compressed request, with equally many tokens in the step."""
        room = batch.page_table.shape[2] * self.kv_cache_spec.block_size
        alone = replace(
            metadata,
            decode=replace(metadata.decode),
            num_decodes=len(batch.rows),
            max_seq_len=min(metadata.max_seq_len, room),
        )
        tables = self.layer_fields(batch, metadata.query_start_loc)
        return Subset(alone, row_index(batch.rows, self.device), tables)

    def _whole_context(self, row: int, common: CommonAttentionMetadata) -> ResidentBatch:
        """Returns an uncompressed request with the pages of all of its blocks."""
        group = CompressedBackend.compression.group_of_layer[self.layer_names[0]]
        pool, length = group.tables.pool, int(host_lengths(common)[row])
        slots: Integers = np.full(common.num_reqs, -1, dtype=np.int64)
        blocks = common.block_table_tensor[row, : ceil_div(length, pool.block_size)].long()
        pages = [pool.layer_page_ids(layer, blocks) for layer in range(pool.num_layers)]
        offsets = torch.zeros(pool.num_layers, 1, 1, dtype=torch.int32, device=pool.device)
        return ResidentBatch(
            **vars(CompressedRows.of(slots, pool.device, np.array([row]))),
            page_table=torch.stack(pages),
            seq_lens=upload(np.full((pool.num_layers, 1), length, dtype=np.int32), pool.device),
            resident_offset=offsets,
            same_in_all_layers=True,
        )


class CompressedLatentImpl(MLACommonImpl[Any]):
    """vLLM's MLA, over the pages of each layer where requests are compressed.

    Attributes:
        layer: the attention layer, once pages lie over its cache.
    """

    alibi_slopes = sinks = logits_soft_cap = None  # vLLM's MLA has none of these
    layer: Any = None
    _prompt_queries: Tensor | None = None

    def fused_output_quant_supported(self, *args: Any, **kwargs: Any) -> bool:
        """Says no: outputs of two calls are put together in the model's own type."""
        return False

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Writes new tokens to the cache, whose blocks may be divided."""
        super().do_kv_cache_update(kv_c_normed, k_pe, self.parts_of(kv_cache), *args, **kwargs)

    def parts_of(self, kv_cache: Tensor) -> Tensor:
        """Returns the layer's [blocks, size, row_size] cache, in parts where blocks are divided."""
        if self.layer is None:
            return kv_cache
        cache = cache_of(self.layer, kv_cache)
        return cache if cache is kv_cache else cache.squeeze(1)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Computes attention of prompts and chunks; ends the layer if nobody generates."""
        step: LatentStep | None = getattr(attn_metadata, _ATTRIBUTE, None)
        given, cache = (q, kv_c_normed, k_pe), self.parts_of(kv_c_and_k_pe_cache)
        if step is None or not step.is_split:
            super().forward_mha(*given, cache, attn_metadata, k_scale, output, output_scale)
        else:
            if step.prompts is not None:
                where, metadata = step.prompts.where, step.prompts.metadata
                metadata.prefill.prefill_backend.prepare_metadata(metadata.prefill)
                out = output[where]
                some = (rows[where] for rows in given)
                super().forward_mha(*some, cache, metadata, k_scale, out)
                output[where] = out
            for subset in step.drafted:
                absorbed = absorb(q[subset.where], self.layer.W_UK_T)
                out = output[subset.where]
                up_project(self.layer, self._attend(subset, absorbed, cache), out)
                output[subset.where] = out
            for batch in step.chunks:
                self._attend_behind_context(batch, attn_metadata, q, output)
        if step is None:
            return
        self._prompt_queries = q
        if not attn_metadata.num_decode_tokens:
            self._finish(step, attn_metadata, None)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of requests that generate, and ends the layer."""
        step: LatentStep | None = getattr(attn_metadata, _ATTRIBUTE, None)
        cache = self.parts_of(kv_c_and_k_pe_cache)
        if step is None:
            output: tuple[Tensor, Tensor | None]
            output = super().forward_mqa(q, cache, attn_metadata, layer)
            return output
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if not step.is_split:
            out, _ = super().forward_mqa(queries, cache, attn_metadata, layer)
        else:
            out = queries.new_empty(*queries.shape[:2], self.kv_lora_rank)
            for subset in step.decodes:
                out[subset.where] = self._attend(subset, queries[subset.where], cache)
        self._finish(step, attn_metadata, queries)
        return out, None

    def _attend(self, subset: Subset, queries: Tensor, cache: Tensor) -> Tensor:
        """Returns the [T, heads, value_size] attention of absorbed queries, all of a subset."""
        if not subset.by_layer:
            out: Tensor = super().forward_mqa(queries, cache, subset.metadata, self.layer)[0]
            return out
        group = CompressedBackend.compression.group_of_layer[self.layer.layer_name]
        fields = subset.by_layer[group.layer_index[self.layer.layer_name]]
        return self.attend_kept(group, subset.metadata, fields, queries)

    def attend_kept(
        self, group: GroupCompression, metadata: Any, fields: dict[str, Tensor], queries: Tensor
    ) -> Tensor:
        """Runs vLLM's decode kernel over pages.

        Args:
            group: the layer's cache group.
            metadata: vLLM's, whose decode metadata takes the fields.
            fields: [requests, any] block_table of pages, and [requests] seq_lens.
            queries: [T, heads, row_size] absorbed queries, equally many of each request.

        Returns:
            [T, heads, value_size] sums of latent vectors.
        """
        for name, value in fields.items():
            setattr(metadata.decode, name, value)
        cache = group.tables.pool.cache_of_one_head.squeeze(1)
        out: Tensor = super().forward_mqa(queries, cache, metadata, self.layer)[0]
        return out

    def attend_chunk(
        self, group: GroupCompression, metadata: Any, batch: QueryBatch, queries: Tensor
    ) -> Tensor:
        """Returns the same for chunks behind a context; `metadata` is vLLM's of all requests."""
        index = group.layer_index[self.layer.layer_name]
        latent = torch.empty_like(queries)
        every = replace(batch, tokens=slice(0, len(queries)))
        biased_attention(group.runner, index, every, queries, latent, self.scale)
        return latent[..., : self.kv_lora_rank]

    def _attend_behind_context(
        self, batch: QueryBatch, metadata: Any, queries: Tensor, output: Tensor
    ) -> None:
        """Writes the [tokens, heads * v_head_dim] outputs of chunks, over pages."""
        group = CompressedBackend.compression.group_of_layer[self.layer.layer_name]
        absorbed = absorb(queries[batch.tokens], self.layer.W_UK_T)
        latent = self.attend_chunk(group, metadata, batch, absorbed)
        out = output[batch.tokens]
        up_project(self.layer, latent, out)
        output[batch.tokens] = out

    def _finish(self, step: LatentStep, metadata: Any, decoded: Tensor | None) -> None:
        """Records queries and runs the events that read them."""
        group = CompressedBackend.compression.group_of_layer[self.layer.layer_name]
        others, self._prompt_queries = self._prompt_queries, None
        queries = AbsorbedQueries(decoded, others, self.layer.W_UK_T)
        index = group.layer_index[self.layer.layer_name]
        group.finish_layer(step.work, index, metadata, queries, None)
