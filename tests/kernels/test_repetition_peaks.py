"""The highest attention that a repetition pays to its context."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.cases import random
from vllm_kvcompress.kernels.common import tiles
from vllm_kvcompress.kernels.repetition_peaks import repetition_peaks


@pytest.mark.parametrize("tile_bytes", [1, 4 * 3 * 29 * 2, 1 << 20])
@pytest.mark.parametrize("head_bytes", [1, 1 << 20])
@pytest.mark.parametrize("sinks", [None, torch.tensor([[3.0, 1.0, -9.0], [0.0, 2.0, 5.0]])])
@pytest.mark.parametrize(("num_queries", "num_context"), [(1, 28), (7, 22), (7, 3), (12, 17)])
def test_peaks_equal_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
    tile_bytes: int,
    head_bytes: int,
    sinks: torch.Tensor | None,
    num_queries: int,
    num_context: int,
) -> None:
    """Tiles of one query, of two, and of all; a head at a time, and all at once."""
    monkeypatch.setattr(tiles, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(tiles, "HEADS_BYTES", head_bytes)
    keys, queries = random(2, 29, 8), random(num_queries, 6, 8, seed=2)
    results = repetition_peaks(keys, queries, 0.7, num_context, sinks)
    expected = oracles.repetition_peaks(keys, queries, 0.7, num_context, sinks)
    torch.testing.assert_close(results, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_chunk_by_chunk_is_all_at_once() -> None:
    """The maximum over chunks, each with the keys up to its end."""
    keys, queries = random(2, 60, 8), random(24, 4, 8, seed=2)
    at_once = repetition_peaks(keys, queries, 0.5, 36)
    parts = [
        repetition_peaks(keys[:, :end], queries[start - 36 : end - 36], 0.5, 36)
        for start, end in ((36, 37), (37, 50), (50, 60))
    ]
    torch.testing.assert_close(torch.stack(parts).amax(0), at_once)


def test_bfloat16_is_widened() -> None:
    keys, queries = random(2, 40, 8).bfloat16(), random(10, 4, 8, seed=2).bfloat16()
    expected = repetition_peaks(keys.float(), queries.float(), 0.5, 30)
    torch.testing.assert_close(repetition_peaks(keys, queries, 0.5, 30), expected)
