"""A stand-in for vLLM's fp8 CPU attention, which needs AVX-512.

Probes (see engine_process.py). Where vLLM's own kernels run, they are left in place. What replaces
them follows vLLM's sources (csrc/cpu/cpu_attn_fp8.hpp): the order inside a page for each kind of
kernel, and numbers that are cut off, not rounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SCALES = [(0.37, 1.9), (1.3, 0.11), (0.8, 0.45)]
KINDS = {"fp8": (3, 7, 0x7E), "fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}


def vector_kernels(report: dict[str, Any]) -> None:
    """Installs the layout of AVX-512: keys transposed, values as rows."""
    _replace(report, "vec")


def tile_kernels(report: dict[str, Any]) -> None:
    """Installs the layout of AMX: elements packed in pairs."""
    _replace(report, "amx")


def scales(report: dict[str, Any]) -> None:
    """Gives layers different fp8 scales, like a checkpoint with scales."""
    from vllm.model_executor.layers.attention import Attention

    load = Attention.process_weights_after_loading

    def scaled(self: Any, *args: Any) -> None:
        load(self, *args)
        number = int(self.layer_name.split(".layers.")[1].split(".")[0])
        self._k_scale_float, self._v_scale_float = SCALES[number % 3]
        self._k_scale.fill_(self._k_scale_float)
        self._v_scale.fill_(self._v_scale_float)

    Attention.process_weights_after_loading = scaled


def writes_fp8(report: dict[str, Any]) -> None:
    """Writes fp8 in torch on the GPU path, where vLLM also quantizes queries.

    Triton's interpreter makes 1.0 of 1.98, where 2.0 is nearest. What this CPU can do is not asked.
    """
    from vllm.v1.attention.backends import cpu_attn, triton_attn

    from tests.gpu_path.torch_kernels import write_cache

    cpu_attn._get_attn_isa = lambda *_: "vec"
    triton_attn.triton_reshape_and_cache_flash = write_cache
    make = triton_attn.TritonAttentionImpl.__init__

    def made_for_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.supports_quant_query_input = True

    triton_attn.TritonAttentionImpl.__init__ = made_for_cuda


def magnitudes(name: str) -> Tensor:
    """Returns [127 or fewer] the values of the unsigned bytes, ascending."""
    mantissa_bits, bias, largest = KINDS[name]
    values = []
    for byte in range(largest + 1):
        exponent, mantissa = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        part = mantissa / (1 << mantissa_bits)
        values.append(math.ldexp(part + (exponent > 0), max(1, exponent) - bias))
    return torch.tensor(values)


def cut_off(numbers: Tensor, name: str, scale: float) -> Tensor:
    """Quantizes numbers to bytes, rounding towards zero."""
    known, scaled = magnitudes(name), numbers.float() * torch.tensor(1 / scale)
    code = torch.searchsorted(known, scaled.abs().contiguous(), right=True) - 1
    return (code + 128 * (scaled < 0)).to(torch.uint8)


def said(codes: Tensor, name: str, scale: float) -> Tensor:
    """Dequantizes bytes to numbers."""
    known = magnitudes(name)
    number = known[(codes & 0x7F).long().clamp_max(len(known) - 1)] * scale
    return torch.where(codes >= 128, -number, number)


def stored(numbers: Tensor, name: str, scale: float, cuts: bool = True) -> Tensor:
    """Returns numbers after a round trip through fp8, cut off or rounded to nearest."""
    if cuts:
        return said(cut_off(numbers, name, scale), name, scale)
    known, scaled = magnitudes(name), numbers.float() / scale
    between = (known[1:] + known[:-1]) / 2
    nearest = known[torch.bucketize(scaled.abs().contiguous(), between)]
    return torch.copysign(nearest, scaled) * scale


def places(kind: str, which: int, size: int, dim: int) -> Tensor:
    """Returns [size, dim] the places of tokens' elements in a page's keys (0) or values (1)."""
    result = torch.empty(size, dim, dtype=torch.int64)
    for token in range(size):
        for element in range(dim):
            if kind == "vec":
                at = token * dim + element if which else element * size + token
            elif which:
                at = element // 16 * size * 16 + token // 2 * 32 + element % 16 * 2 + token % 2
            else:
                at = token // 16 * 16 * dim + element // 2 * 32 + token % 16 * 2 + element % 2
            result[token, element] = at
    return result


def _replace(report: dict[str, Any], kind: str) -> None:
    from vllm.v1.attention.backends import cpu_attn

    report["kernels"] = "vLLM's"
    if torch.cpu._is_avx512_supported():
        return
    report["kernels"] = kind
    cpu_attn._get_attn_isa = lambda *_: kind
    kernels = _Kernels(kind)
    cpu_attn.ops.cpu_attn_get_scheduler_metadata = lambda **_: torch.zeros(1)
    cpu_attn.ops.cpu_attn_reshape_and_cache = kernels.write
    cpu_attn.ops.cpu_attention_with_kv_cache = kernels.attend


class _Kernels:
    """Kernels with vLLM's signatures, for one kind of instruction set."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.known: dict[tuple[int, int, int], Tensor] = {}

    def places(self, which: int, size: int, dim: int) -> Tensor:
        key = (which, size, dim)
        if key not in self.known:
            self.known[key] = places(self.kind, *key)
        return self.known[key]

    def pages(self, cache: Tensor) -> Tensor:
        """Returns [blocks, heads, size * dim] bytes of keys or values in their layout."""
        num_blocks, num_heads, size, dim = cache.shape
        return torch.as_strided(
            cache, (num_blocks, num_heads, size * dim), (*cache.stride()[:2], 1)
        )

    def write(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        isa: str,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        assert isa == self.kind
        assert key_cache.dtype == torch.uint8
        _, num_heads, size, dim = key_cache.shape
        written = slot_mapping >= 0
        slots = slot_mapping[written]
        heads = torch.arange(num_heads)[None, :, None]
        for which, (rows, cache, scale) in enumerate(
            [(key, key_cache, k_scale), (value, value_cache, v_scale)]
        ):
            at = self.places(which, size, dim)[slots % size][:, None]
            codes = cut_off(rows[: len(slot_mapping)][written], kv_cache_dtype, scale)
            self.pages(cache)[(slots // size)[:, None, None], heads, at] = codes

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        causal: bool,
        block_table: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_dtype: str = "auto",
        **options: Any,
    ) -> None:
        assert causal
        assert options["sliding_window"] == -1
        _, num_heads, size, _ = key_cache.shape
        starts, group = query_start_loc.tolist(), query.shape[1] // num_heads
        for s, length in enumerate(seq_lens.tolist()):
            blocks = block_table[s, : math.ceil(length / size)].long()
            caches = (key_cache, k_scale), (value_cache, v_scale)
            keys, values = (
                self.read(cache, which, blocks, length, kv_cache_dtype, by)
                for which, (cache, by) in enumerate(caches)
            )
            first, last = starts[s], starts[s + 1]
            queries = query[first:last].float().unflatten(1, (-1, group))
            logits = torch.einsum("qhgd,hkd->hgqk", queries, keys) * scale
            later = torch.ones(last - first, length).triu(length - (last - first) + 1).bool()
            weights = logits.masked_fill(later, -math.inf).softmax(-1)
            mixed = torch.einsum("hgqk,hkd->qhgd", weights, values)
            output[first:last] = mixed.flatten(1, 2).to(output.dtype)

    def read(
        self, cache: Tensor, which: int, blocks: Tensor, length: int, name: str, scale: float
    ) -> Tensor:
        """Returns [heads, length, dim] the dequantized keys or values."""
        places = self.places(which, *cache.shape[2:])
        codes = self.pages(cache)[blocks][:, :, places]
        rows = codes.transpose(0, 1).flatten(1, 2)[:, :length]
        return said(rows, name, scale)
