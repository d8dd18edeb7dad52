"""Keys and values as vLLM's quantized caches give them back, in torch: CPUs have no such kernels.

Scales per token and head follow vLLM 0.32: `v1/attention/ops/triton_reshape_and_cache_flash.py`,
and for int4 `int4_per_token_head.py`, whose rotation is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

MIN_SCALE = 1e-6


def in_fp8(numbers: Tensor, cuts: bool = False) -> Tensor:
    """Numbers as fp8_e4m3 has them with a scale of 1: rounded, or cut off as by vLLM on CPUs."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    codes = numbers.clamp(-largest, largest).to(torch.float8_e4m3fn)
    if cuts:
        beyond = codes.float().abs() > numbers.float().abs()
        codes = (codes.view(torch.uint8) - beyond.to(torch.uint8)).view(codes.dtype)
    return codes.to(numbers.dtype)


def away_from_zero(numbers: Tensor) -> Tensor:
    """Rounds to integers, halves away from zero, as vLLM's kernels do."""
    return torch.where(numbers >= 0, numbers + 0.5, numbers - 0.5).trunc()


def in_int8_per_token_head(numbers: Tensor) -> Tensor:
    """[..., D] numbers with the largest of D as 127: symmetric, without a zero point."""
    scale = (numbers.float().abs().amax(-1, keepdim=True) / 127).clamp_min(MIN_SCALE)
    codes = away_from_zero(numbers.float() * (1 / scale)).clamp(-128, 127)
    return (codes * scale).to(numbers.dtype)


def in_fp8_per_token_head(numbers: Tensor) -> Tensor:
    """[..., D] numbers with the largest of D as 448, the largest of fp8_e4m3."""
    scale = (numbers.float().abs().amax(-1, keepdim=True) / 448).clamp_min(MIN_SCALE)
    return (in_fp8(numbers.float() * (1 / scale)) * scale).to(numbers.dtype)


def in_int4_per_token_head(numbers: Tensor) -> Tensor:
    """[..., D] numbers, rotated, in 16 steps from their least to their largest, rotated back.

    The zero point, an integer from 0 to 15, takes the place of the scale's last four bits.
    """
    from vllm.utils.math_utils import largest_power_of_2_divisor
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    rotated = single_rht(numbers.float()).to(numbers.dtype).float()
    least, largest = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    scale = ((largest - least) / 15).clamp_min(MIN_SCALE)
    zero = away_from_zero(-least / scale).clamp(0, 15)
    codes = away_from_zero(rotated * (1 / scale) + zero).clamp(0, 15)
    stored_scale = (scale.view(torch.int32) & -16).view(torch.float32)
    back = single_rht((codes - zero) * stored_scale, inverse=True)
    return (back / largest_power_of_2_divisor(numbers.shape[-1])).to(numbers.dtype)


CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "auto": lambda numbers: numbers,
    "fp8": in_fp8,
    "fp8-cut": partial(in_fp8, cuts=True),
    "int8_per_token_head": in_int8_per_token_head,
    "fp8_per_token_head": in_fp8_per_token_head,
    "int4_per_token_head": in_int4_per_token_head,
}
