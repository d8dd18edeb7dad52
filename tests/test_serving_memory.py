"""What serving allocates after a server has measured itself stays below what it left for that.

Rings of queries and what an event holds are in the measurement (`test_dummy_runs.py`); here are
page tables, what batches read from them, and the buffers that CUDA graphs read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.accelerator import ACCELERATOR
from tests.live_bytes import LiveBytes
from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.cache.page_rows import Integers
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.vllm_plugin.memory import TABLES_SHARE

BLOCK = 16
STEPS = 20  # of a block's tokens each


@dataclass(frozen=True)
class Shape:
    """A model on one rank, beside which `cache_gib` are left."""

    num_layers: int
    num_heads: int
    head_size: int
    cache_gib: int

    @property
    def cache_bytes(self) -> int:
        return self.cache_gib * 2**30

    @property
    def most_tokens(self) -> int:
        """That the cache holds in bf16."""
        return self.cache_bytes // (4 * self.num_layers * self.num_heads * self.head_size)


LLAMA_3_2_1B = Shape(16, 8, 64, 20)
QWEN3_8B = Shape(36, 8, 128, 40)
LLAMA_3_1_70B_OF_4 = Shape(80, 2, 128, 30)
LONG = 40_960


def one_among_many(shape: Shape) -> list[tuple[int, int]]:
    """[requests] tokens before and after: short ones, and one whose heads are not counted yet."""
    return [(2048, 512)] * 255 + [(LONG, LONG)]


def all_long(shape: Shape) -> list[tuple[int, int]]:
    """As many as the cache holds at a quarter, the longest head of each twice the mean."""
    number = min(256, shape.most_tokens // (LONG // 4 + STEPS * BLOCK))
    return [(LONG, LONG // 2)] * number


def rising(shape: Shape) -> list[tuple[int, int]]:
    """Of every length, longest heads three times the mean."""
    lengths = [LONG * nth // 192 for nth in range(1, 193)]
    while sum(length // 4 + STEPS * BLOCK for length in lengths) > shape.most_tokens:
        lengths = lengths[::2]
    return [(length, length * 3 // 4) for length in lengths]


@pytest.mark.parametrize("batch", [one_among_many, all_long, rising])
@pytest.mark.parametrize("shape", [LLAMA_3_2_1B, QWEN3_8B, LLAMA_3_1_70B_OF_4])
def test_tables_stay_within_their_share(
    shape: Shape, batch: Callable[[Shape], list[tuple[int, int]]]
) -> None:
    requests = batch(shape)
    num_blocks = shape.cache_bytes // (4 * BLOCK * shape.head_size)
    pool = InterleavedPagePool(
        pages=torch.empty(num_blocks, 2 * BLOCK * shape.head_size, device=ACCELERATOR),
        pages_per_block=shape.num_layers * shape.num_heads,
        layer_offsets=torch.empty(shape.num_layers, dtype=torch.int64, device=ACCELERATOR),
        num_heads=shape.num_heads,
        block_size=BLOCK,
        head_size=shape.head_size,
    )
    names = [f"r{nth}" for nth in range(len(requests))]
    lengths = np.array([length for length, _ in requests])
    block_table = torch.zeros(len(names), LONG // BLOCK + STEPS, device=ACCELERATOR).int()
    with LiveBytes() as memory:
        tables, before = PageTables(pool), memory.live
        scales = [1.0] * shape.num_layers
        graphs = DecodeSteps(pool, 256, 4 * shape.num_heads, scales, records=True)
        assert memory.live - before < 2**20
        batches = ResidentBatches(tables)
        for nth, (length, longest) in enumerate(requests):
            slot = tables.acquire(names[nth])
            tables.rows.reserve(slot, longest // BLOCK)
            tables.begin_tail(slot, length // BLOCK, longest // BLOCK)
            if nth % 8 == 0:
                step(batches, names, lengths, block_table)
        for _ in range(STEPS):
            lengths += BLOCK
            step(batches, names, lengths, block_table)
    assert graphs.scales
    assert 0 < memory.peak - before < TABLES_SHARE * shape.cache_bytes


def step(
    batches: ResidentBatches, names: list[str], lengths: Integers, block_table: torch.Tensor
) -> None:
    seq_lens = torch.zeros(len(names), dtype=torch.int32, device=ACCELERATOR)
    batches.read(names, lengths, seq_lens, block_table)
