"""The part that compressed attention on vLLM's GPU backends shares."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.cache.pages import (
    InterleavedPagePool,
    PagePool,
    Quantization,
    flat_pages,
    random_codes,
)
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.vllm_plugin.startup.quantized import quantization_of
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend

FP32_BYTES = 4


class CompressedGPUBackend(CompressedBackend):
    """A GPU backend of vLLM, with compression, under the name CUSTOM."""

    @staticmethod
    def get_name() -> str:
        """Returns the name that vLLM's registry keeps for backends from outside."""
        return "CUSTOM"

    @classmethod
    def scratch_bytes(cls, vllm_config: VllmConfig) -> int:
        """Returns bytes that vLLM's kernels take for a moment for compressed requests, per rank."""
        return 0

    @classmethod
    def page_pool(cls, layers: list[Any], spec: AttentionSpec) -> PagePool:
        """Lays pages over the caches; each holds rows of a key and its value."""
        caches = [layer.kv_cache for layer in layers]
        if caches[0].shape[2] != spec.block_size:
            raise UnsupportedError(
                f"expected a KV cache with blocks of {caches[0].shape[2]} tokens, which this "
                f"attention kernel takes, found {spec.block_size}; start with --block-size "
                f"{caches[0].shape[2]}."
            )
        quantization = quantization_of(layers, cls.compression.vllm_config)
        check_rows(layers[0], spec, quantization)
        pages, pages_per_block, offsets = flat_pages(caches)
        return InterleavedPagePool(
            pages=pages,
            pages_per_block=pages_per_block,
            layer_offsets=upload(offsets, pages.device),
            num_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            head_size=spec.head_size,
            quantization=quantization,
        )


def check_rows(layer: Any, spec: AttentionSpec, quantization: Quantization | None) -> None:
    """Refuses kernels that store anything but rows of [key, value] in a page.

    A probe goes through the backend's own cache-write op into a page of its own.

    Raises:
        UnsupportedError: the kernels use another order.
    """
    size, head_size = spec.block_size, spec.head_size
    device = layer.kv_cache.device
    shape = (1, spec.num_kv_heads, size, 2 * head_size)
    page = torch.zeros(shape, dtype=spec.dtype, device=device)
    if quantization is None:
        rows = torch.randn((size, spec.num_kv_heads, 2 * head_size), device=device).to(spec.dtype)
        keys, values = rows.split(head_size, dim=-1)
    else:
        rows = random_codes(size, spec.num_kv_heads, 2 * head_size).to(device)
        halves = enumerate(rows.split(head_size, dim=-1))
        keys, values = (quantization.dequantize(half, 0, which) for which, half in halves)
    slots = torch.arange(size, device=device)
    layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), page, slots)
    if not torch.equal(page[0].transpose(0, 1), rows):
        raise UnsupportedError(
            "expected an attention kernel that stores a page as rows of a key and its value, "
            "found another order, in which compression would destroy them; serve without "
            "--kv-policy, or with another --dtype."
        )
