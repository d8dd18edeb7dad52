"""Sizes of temporaries, and padding: what torch operators share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

TILE_BYTES = 1 << 23  # largest temporary; reused, since fresh memory costs more than the work
HEADS_BYTES = 1 << 20  # of heads that a thread goes through at once: what a core's cache holds
THREADS_BYTES = 1 << 27  # of heads that all threads go through at once
KEPT_BYTES = 1 << 28  # of freed memory that a process keeps
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
DEVICE_TILE_BYTES = 1 << 27  # the same off the CPU: every tile takes some launches


def keep_freed_memory() -> None:
    """Has glibc reuse the memory of large temporaries, which it would return to the system.

    Linux clears the memory that it hands out again: half of the time of an `adakv` event. tcmalloc,
    where it is preloaded, keeps such memory by itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the highest that glibc takes
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def valid_entries(lengths: Tensor, num_entries: int) -> Tensor:
    """[H, n] bool: entries below each head's length."""
    return torch.arange(num_entries, device=lengths.device) < lengths[:, None]


def tile_bytes(device: torch.device) -> int:
    """Bytes of the largest temporary on a device."""
    return TILE_BYTES if device.type == "cpu" else DEVICE_TILE_BYTES


def cached_bytes(device: torch.device) -> int:
    """Bytes to read several times at once: on the CPU as much as the caches of the cores hold."""
    return HEADS_BYTES * torch.get_num_threads() if device.type == "cpu" else DEVICE_TILE_BYTES


def head_slices(num_heads: int, head_bytes: int, device: torch.device) -> list[slice]:
    """Heads that an operator goes through at once, with temporaries of `head_bytes` for each.

    On the CPU at least one for each thread, if they fit: operators divide work among threads by
    head, and each of them waits for all threads.
    """
    at_once = cached_bytes(device) // max(1, head_bytes)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        at_once = max(num_threads, at_once // num_threads * num_threads)
        at_once = min(at_once, THREADS_BYTES // max(1, head_bytes))
    at_once = max(1, min(num_heads, at_once))
    return [slice(first, first + at_once) for first in range(0, num_heads, at_once)]


@cache
def multiplies_bf16(device: torch.device) -> bool:
    """Whether products of bf16 numbers take less time than those of fp32 ones."""
    if device.type != "cpu":
        return True
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@contextmanager
def exact_bf16_products(dtype: torch.dtype) -> Iterator[None]:
    """Lets fp32 matrix products on the CPU use its bf16 units, where nothing is lost by it.

    Tensors that were widened from bf16 convert back without loss, and sums stay fp32: the same
    result several times faster, which bf16 tensors cannot ask for on the CPU (their products are
    rounded to bf16). For any other `dtype` nothing changes.

    Args:
        dtype: type of both factors before they were widened.
    """
    if dtype != torch.bfloat16:
        yield
        return
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def finite(keys: Tensor, valid: Tensor) -> Tensor:
    """Returns keys with zeros for padding, which may hold anything.

    On the CPU the same tensor where there is no padding; a GPU would have to be waited for.
    """
    if valid.device.type == "cpu" and bool(valid.all()):
        return keys
    return keys.masked_fill(~valid[..., None], 0.0)
