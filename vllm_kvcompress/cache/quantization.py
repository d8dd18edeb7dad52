"""Quantized caches: how a key or value is stored in a page, and what attention reads.

vLLM has two kinds. In `fp8` a stored number times the scale of its layer is read (`LayerScaled`).
With a scale per token and head the scale lies behind the numbers of each key and value
(`TokenScaled`). Kept tokens are copied as stored, scales included: nothing is rounded twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_kvcompress.kernels.common.rotary import Rotary

# By vLLM's names: the type of the numbers in a page.
FP8_TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
INT4 = "int4_per_token_head"  # two numbers in a byte
TOKEN_SCALED_TYPES = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
    INT4: torch.uint8,
}
SCALE_BYTES = 4  # of a token's key, and of its value
MEAN_POSITIONS = 4096  # of the rotated bias of keys


def row_bytes(name: str, head_size: int) -> int | None:
    """Returns bytes of a stored key in a quantized cache, by vLLM's name; None: any other."""
    if name in FP8_TYPES:
        return head_size
    if name in TOKEN_SCALED_TYPES:
        return (head_size // 2 if name == INT4 else head_size) + SCALE_BYTES
    return None


def random_codes(*shape: int) -> Tensor:
    """Returns random bytes that are finite in every fp8 type, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(8, 120, shape, generator=generator).to(torch.uint8)


def mean_key(bias: Tensor, rotary: Rotary) -> Tensor:
    """Returns the [H, D] mean of a bias of keys, rotated to each of `MEAN_POSITIONS` positions.

    It is subtracted from keys before they are stored: rounding errors grow with the largest element
    of a key, and elements of such a bias are far larger than the rest (up to 360 in Qwen2.5-Coder).
    A softmax stays the same if the same is subtracted from all of its logits, so attention is that
    of whole keys. SageAttention (arXiv 2410.02367) subtracts the mean of the keys that it attends
    to, which a cache does not know yet.
    """
    mean = bias.float() @ rotary.averaged(MEAN_POSITIONS, bias.shape[1])
    return mean.to(bias.dtype)


@dataclass(eq=False)
class Quantization(ABC):
    """A type of quantized cache.

    Attributes:
        stored: type of the stored numbers.
        dtype: the model's type, in which keys and values are read.
    """

    stored: torch.dtype
    dtype: torch.dtype

    @abstractmethod
    def row_size(self, head_size: int) -> int:
        """Returns the bytes of a stored key or value of `head_size` elements."""

    @abstractmethod
    def dequantize(self, rows: Tensor, layer: int, which: int) -> Tensor:
        """Converts [..., row_size] stored bytes to a layer's [..., head_size] keys (0) or values
        (1) in the model's type (a copy)."""

    @abstractmethod
    def filled(self, number: float, row_size: int) -> Tensor:
        """Returns a [row_size] uint8 row that stands for a number again and again, or for the
        largest one that can be stored; NaN is possible."""


@dataclass(eq=False)
class LayerScaled(Quantization):
    """A cache in fp8.

    Attributes:
        scales: positive key scale and value scale of every layer.
    """

    scales: Sequence[tuple[float, float]]

    def row_size(self, head_size: int) -> int:
        return head_size

    def dequantize(self, rows: Tensor, layer: int, which: int) -> Tensor:
        # On one CPU thread a lookup takes 1.9 ns per number, torch's conversion 6.9 ns.
        if rows.device.type == "cpu":
            table = self._tables[layer][which]
            return table.index_select(0, rows.flatten().int()).view(rows.shape)
        return rows.view(self.stored).to(self.dtype).mul_(self.scales[layer][which])

    def filled(self, number: float, row_size: int) -> Tensor:
        largest = torch.finfo(self.stored).max
        row = torch.full((row_size,), number).clamp_max(largest)
        return row.to(self.stored).view(torch.uint8)

    def set_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """Replaces the scales after the model's weights changed."""
        self.scales = scales
        vars(self).pop("_tables", None)

    @cached_property
    def _tables(self) -> list[list[Tensor]]:
        """[256] value of each byte, for the keys and the values of every layer."""
        codes = torch.arange(256, dtype=torch.uint8).view(self.stored).to(self.dtype)
        return [[codes * scale for scale in scales] for scales in self.scales]


@dataclass(eq=False)
class TokenScaled(Quantization):
    """A cache with a scale per token and head, as vLLM's Triton attention has them.

        int8, fp8   [ head_size numbers                           ][ scale: fp32 ]
        int4        [ head_size / 2 pairs, the first one in low bits ][ scale: fp32 ]

    Attributes:
        rotates_back: [head_size, head_size] fp32: numbers of int4, less the zero point and times
            the scale, times this are keys or values. The zero point is in the scale's last four
            bits. None: other types, whose numbers times the scale are.
    """

    rotates_back: Tensor | None = None

    def row_size(self, head_size: int) -> int:
        return (head_size if self.rotates_back is None else head_size // 2) + SCALE_BYTES

    def dequantize(self, rows: Tensor, layer: int, which: int) -> Tensor:
        scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        codes = rows[..., :-SCALE_BYTES].view(self.stored)
        if self.rotates_back is None:
            return (codes.float() * scales).to(self.dtype)
        bits, pairs = scales.view(torch.int32), torch.stack((codes & 15, codes >> 4), dim=-1)
        numbers = (pairs.flatten(-2) - (bits & 15)) * (bits & -16).view(torch.float32)
        return (numbers @ self.rotates_back).to(self.dtype)

    def filled(self, number: float, row_size: int) -> Tensor:
        codes = torch.ones(row_size - SCALE_BYTES).to(self.stored).view(torch.uint8)
        return torch.cat([codes, torch.tensor([number]).view(torch.uint8)])
