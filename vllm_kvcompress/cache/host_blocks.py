"""Host memory that blocks of the cache are copied to and back, page-locked on CUDA.

Copies are queued on the current stream, and nothing waits for them: what is queued later may write
to the blocks that were copied out, and reads what was copied in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.errors import ConfigError

_MEMORY = Path("/proc/meminfo")
_GIB = 2**30


class HostBlocks:
    """Host memory for blocks of this rank's cache.

    Args:
        pool: the cache. All pages of a block are copied, since one cache group has all of them.
        num_slots: blocks in host memory.

    Raises:
        ConfigError: the host has less memory available, or cannot lock it.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._pool = pool
        per_block, width = pool.pages_per_block, pool.pages.shape[1]
        _check_available(num_slots * per_block * pool.page_bytes)
        self._pages = torch.empty(
            (num_slots * per_block, width), dtype=pool.pages.dtype, device="cpu"
        )
        if pool.device.type == "cuda":
            _lock(self._pages)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks of the cache to slots of host memory."""
        self._copy(self._pages, slots, self._pool.pages, blocks)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies slots of host memory to blocks of the cache."""
        self._copy(self._pool.pages, blocks, self._pages, slots)

    def _copy(
        self,
        target: torch.Tensor,
        targets: Sequence[int],
        source: torch.Tensor,
        sources: Sequence[int],
    ) -> None:
        """Copies blocks, neighbours at once: one copy is a transfer without a kernel."""
        size = self._pool.pages_per_block
        for first, start, count in _runs(targets, sources):
            into = target[first * size : (first + count) * size]
            into.copy_(source[start * size : (start + count) * size], non_blocking=True)


def _runs(targets: Sequence[int], sources: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the first target, first source and length of runs that ascend by 1 in both."""
    begin = 0
    for end in range(1, len(targets) + 1):
        ends = end == len(targets)
        if ends or (targets[end] - targets[end - 1], sources[end] - sources[end - 1]) != (1, 1):
            yield targets[begin], sources[begin], end - begin
            begin = end


def _check_available(num_bytes: int) -> None:
    """Refuses more memory than Linux says is available; elsewhere allocating fails."""
    lines = _MEMORY.read_text().splitlines() if _MEMORY.exists() else []
    available = next((int(each.split()[1]) for each in lines if "MemAvailable" in each), None)
    if available is not None and num_bytes > available * 1024:
        raise ConfigError(
            f"spill (--kv-spill): expected {num_bytes / _GIB:.1f} GiB of host memory on this rank, "
            f"found {available / 2**20:.1f} GiB available; give less."
        )


def _lock(pages: torch.Tensor) -> None:
    """Locks memory in place: torch's own page-locked memory would be the next power of two."""
    error = torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)
    if int(error):
        raise ConfigError(
            f"spill (--kv-spill): CUDA could not lock {pages.nbytes / _GIB:.1f} GiB of host memory "
            f"(error {int(error)}); give less, or raise the limit of locked memory (ulimit -l)."
        )
