"""Timers for a GPU, and the bandwidths that times are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from gpu_parts.cuda_graph import capture_graph

T = TypeVar("T")
FLUSH_BYTES = 1 << 28  # more than any cache


def progress(items: Iterable[T], name: str) -> Iterable[T]:
    """The items, with a progress bar where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(list(items), desc=name)
    return bar


def seconds_of(work: Callable[[], Any], repeats: int) -> float:
    """Median time of `work` on the device.

    It is captured as a graph, since a server replays graphs too, and what the host needs for a
    launch is not what kernels cost. Caches are flushed before every repetition, by reading: lines
    that were written would have to be written back while `work` reads.
    """
    replay = capture_graph(work)
    other = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(repeats):
        fill_caches_with(other)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1000)
    return statistics.median(times)


def fill_caches_with(other: torch.Tensor) -> None:
    """Reads other memory, and writes next to nothing, so that caches hold no line of `work`'s."""
    other.sum()


def host_seconds_of(work: Callable[[], Any], calls: int = 50) -> float:
    """Mean time that the host takes to queue `work`, for fewer launches than a GPU's queue holds.

    Where attention runs between a server's graphs every step pays this in every layer.
    """
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    seconds = time.perf_counter() - started
    torch.cuda.synchronize()
    return seconds / calls


@triton.jit
def _read_kernel(numbers, sums, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for block in tl.static_range(BLOCKS):
        total += tl.load(numbers + (program * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total, 0))


def copy_bandwidth(num_bytes: int, repeats: int) -> float:
    """Bytes per second, read and written together, of a copy from device to device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), repeats)


def read_bandwidth(num_bytes: int, repeats: int) -> float:
    """Bytes per second that a kernel reads which does nothing else."""
    block, blocks = 4096, 8
    programs = num_bytes // (4 * block * blocks)
    numbers = torch.zeros(programs * block * blocks, dtype=torch.int32, device="cuda")
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")

    def read() -> None:
        _read_kernel[(programs,)](numbers, sums, BLOCK=block, BLOCKS=blocks, num_warps=8)

    return 4 * numbers.numel() / seconds_of(read, repeats)
