"""vLLM's Triton MLA, with compression.

A token of a chunk behind a compressed context is a sequence of its own for the decode kernel: as
long as what it sees. So chunks need no copies of the context and no memory that vLLM has not
reserved for its decode steps.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.attention.biased import QueryBatch
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.worker_side.attention.gpu import CompressedGPUBackend
from vllm_kvcompress.vllm_plugin.worker_side.attention.latent import (
    CompressedLatentBackend,
    CompressedLatentBuilder,
    CompressedLatentImpl,
)
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression

ONE_SPLIT = 1  # a `max_seq_len` for which vLLM's kernel does not divide sequences


class CompressedTritonLatentImpl(CompressedLatentImpl, triton_mla.TritonMLAImpl):
    """Triton MLA over pages."""

    def attend_chunk(
        self, group: GroupCompression, metadata: Any, batch: QueryBatch, queries: Tensor
    ) -> Tensor:
        """Runs vLLM's decode kernel for some of the queries at a time.

        context       | chunk
        ------------------------
        . . . . . . . | q . . .     sequence of query 0: 8 tokens
        . . . . . . . | . q . .     sequence of query 1: 9 tokens
        """
        pages, lengths = batch.requests.layers[group.layer_index[self.layer.layer_name]]
        decode = replace(metadata, decode=replace(metadata.decode), max_seq_len=ONE_SPLIT)
        if batch.num_queries == 1:
            fields = {"block_table": pages, "seq_lens": lengths}
            return self.attend_kept(group, decode, fields, queries)
        # One request: its last query sees everything.
        behind = torch.arange(1 - len(queries), 1, dtype=lengths.dtype, device=lengths.device)
        seen, latents = lengths + behind, []
        most = CompressedBackend.compression.vllm_config.scheduler_config.max_num_seqs
        for part, part_seen in zip(queries.split(most), seen.split(most), strict=True):
            fields = {"block_table": pages.expand(len(part), -1), "seq_lens": part_seen}
            latents.append(self.attend_kept(group, decode, fields, part))
        return torch.cat(latents)


class CompressedTritonLatentBuilder(CompressedLatentBuilder, triton_mla.TritonMLAMetadataBuilder):
    """Builds Triton MLA's metadata for the requests that it reads."""


class CompressedTritonLatentBackend(
    CompressedLatentBackend, CompressedGPUBackend, triton_mla.TritonMLABackend
):
    """Triton MLA over a block-major cache whose pages any layer may own."""

    impl_class, builder_class = CompressedTritonLatentImpl, CompressedTritonLatentBuilder

    @classmethod
    def page_pool(cls, layers: list[Any], caches: list[Tensor], spec: AttentionSpec) -> PagePool:
        """Lays pages over the caches, whose blocks have the rows of other layers between them."""
        pool = super().page_pool(layers, caches, spec)
        check_strides(layers[0], caches[0].squeeze(1))
        return pool


def check_strides(layer: Any, cache: Tensor) -> None:
    """Refuses a decode kernel that takes blocks to lie side by side, as vLLM's once did.

    A query reads one row, whose latent vector the kernel must return.

    Raises:
        UnsupportedError: it reads another row.
    """
    _, size, row_size = cache.shape
    blocks = torch.randn((2, 2, size, row_size), device=cache.device).to(cache.dtype)
    one = torch.ones(1, dtype=torch.int32, device=cache.device)
    decode = SimpleNamespace(block_table=one[None], seq_lens=one)
    metadata = SimpleNamespace(decode=decode, max_seq_len=ONE_SPLIT, causal=True)
    query = blocks.new_zeros((1, layer.impl.num_heads, row_size))
    found, _ = layer.impl.forward_mqa(query, blocks[:, 0], metadata, layer)
    if not torch.equal(found[0, 0], blocks[1, 0, 0, : found.shape[2]]):
        raise UnsupportedError(
            "expected an MLA decode kernel that reads blocks at any stride, found one that takes "
            "them to lie side by side; use vLLM 0.32, or serve without --kv-policy."
        )
