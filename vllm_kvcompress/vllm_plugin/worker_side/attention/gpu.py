"""The part that compressed attention on vLLM's GPU backends shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress.cache.pages import FlatPages, InterleavedPagePool, PagePool, flat_pages
from vllm_kvcompress.cache.quantization import (
    LayerScaled,
    Quantization,
    TokenScaled,
    random_codes,
)
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.vllm_plugin.compat.layers import forget_scales, view_scales
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
    def page_pool(cls, layers: list[Any], caches: list[Tensor], spec: AttentionSpec) -> PagePool:
        """Lays pages over the caches; each holds rows of a key and its value."""
        if caches[0].shape[2] != spec.block_size:
            raise UnsupportedError(
                f"expected a KV cache with blocks of {caches[0].shape[2]} tokens, which this "
                f"attention kernel takes, found {spec.block_size}; start with --block-size "
                f"{caches[0].shape[2]}."
            )
        quantization = quantization_of(layers, cls.compression.vllm_config)
        check_rows(layers[0], caches[0], spec, quantization)
        pool = cls.pool_over(layers, spec, flat_pages(caches))
        if isinstance(quantization, TokenScaled):
            view_scales(layers, pool.cache_of_one_head)
        return pool

    @classmethod
    def pool_over(cls, layers: list[Any], spec: AttentionSpec, flat: FlatPages) -> PagePool:
        """Makes a pool of pages whose rows are a key and its value."""
        return InterleavedPagePool(
            pages=flat.pages,
            pages_per_block=flat.per_block,
            layer_offsets=upload(flat.layer_offsets, flat.pages.device),
            num_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            head_size=spec.head_size,
            quantization=quantization_of(layers, cls.compression.vllm_config),
        )


def check_rows(
    layer: Any, cache: Tensor, spec: AttentionSpec, quantization: Quantization | None
) -> None:
    """Refuses kernels that store anything but rows of [key, value] in a page.

    A probe goes through the backend's own cache-write op into a page of its own. With a scale per
    token what is read must be close to what was written.

    Raises:
        UnsupportedError: the kernels use another order.
    """
    size, head_size = spec.block_size, spec.head_size
    device, shape = cache.device, (size, spec.num_kv_heads, 2, head_size)
    if isinstance(quantization, LayerScaled):
        rows = random_codes(*shape).to(device)
        read = torch.stack([quantization.dequantize(rows[:, :, i], 0, i) for i in (0, 1)], dim=2)
    else:
        dtype = spec.dtype if quantization is None else quantization.dtype
        rows = read = torch.randn(shape, device=device).to(dtype)
    slots = torch.arange(size, device=device)
    page = torch.zeros_like(cache[:1])
    keys, values = (each.contiguous() for each in read.unbind(dim=2))
    layer.impl.do_kv_cache_update(layer, keys, values, page, slots)
    found = page[0].transpose(0, 1).unflatten(2, (2, -1))
    if isinstance(quantization, TokenScaled):
        forget_scales(layer.impl)
        found = quantization.dequantize(found, 0, 0)
        same = bool(((found - rows).norm(dim=-1) < 0.5 * rows.norm(dim=-1)).all())
    else:
        same = torch.equal(found, rows)
    if not same:
        raise UnsupportedError(
            "expected an attention kernel that stores a page as rows of a key and its value, "
            "found another order, in which compression would destroy them; serve without "
            "--kv-policy, or with another --dtype."
        )
