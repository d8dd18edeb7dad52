"""Attention with biases by distance, of entries at any positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.alibi import Alibi, attention_by_distance
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.window_mass import window_masses_by_distance


def positions_of(lengths: list[int], ends: list[int], width: int) -> torch.Tensor:
    """[H, width] increasing positions of the entries, the last five side by side up to `ends`."""
    generator, rows = torch.Generator().manual_seed(1), []
    for length, end in zip(lengths, ends, strict=True):
        before = max(0, length - 5)
        first = torch.randperm(end - length + before, generator=generator)[:before].sort().values
        rows.append([*first.tolist(), *range(end - length + before, end)])
    return torch.tensor([row + [10**6] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("with_roots", [False, True])
@pytest.mark.parametrize("num_tail", [0, 2])
def test_window_mass_counts_distances(num_tail: int, with_roots: bool) -> None:
    """One head is shorter than the window, and the two count of every third query."""
    lengths, ends = [3, 17, 8], [3, 90, 30]
    entries = make_entries(lengths, block_size=4, head_size=8)
    at = positions_of(lengths, ends, entries.capacity)
    slopes, queries = random(3, 2, seed=4).abs(), random(5, 6, 8)

    def added(s: int, g: int, i: int, j: int) -> float:
        distance = ends[s] - (5 - i) - int(at[s, j])
        assert distance >= 0
        return -float(slopes[s, g]) * (math.sqrt(distance) if with_roots else distance)

    view = PagedKV.of(entries, num_tail)
    body = torch.where(torch.arange(at.shape[1]) < view.lengths[:, None], at, 10**6)
    more = Alibi(slopes, with_roots), body, torch.tensor(ends)
    found = window_masses_by_distance(view, queries, 0.3, [(5, 3), (5, 1)], *more)
    for masses, stride in zip(found, (3, 1), strict=True):
        expected = oracles.window_mass(entries, num_tail, queries, 0.3, None, stride, None, added)
        assert_close(masses, torch.tensor(expected), torch.float32)


@pytest.mark.parametrize("with_roots", [False, True])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_attention_counts_distances(
    num_queries: int, with_roots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of two heads, in tiles of two queries."""
    monkeypatch.setattr("vllm_kvcompress.kernels.alibi.MASK_BYTES", 4 * 4 * 3 * 12 * 2)
    lengths, ends = [12, 7, 9, 5], [40, 40, 23, 23]
    at = positions_of(lengths, ends, 12)
    slopes = random(2, 3, seed=4).abs()
    queries, keys, values = (
        random(4, 3, num_queries, 8),
        random(4, 12, 8, seed=2),
        random(4, 12, 8, seed=3),
    )
    given: tuple[Any, ...] = queries, keys, values, at, torch.tensor(ends), 0.3
    found = attention_by_distance(*given, Alibi(slopes, with_roots))
    for s, length in enumerate(lengths):
        for g in range(3):
            for i in range(num_queries):
                own, logits = ends[s] - num_queries + i, []
                for j in range(length):
                    distance = own - int(at[s, j])
                    if distance >= 0:
                        amount = math.sqrt(distance) if with_roots else distance
                        product = oracles.dot(queries[s, g, i].tolist(), keys[s, j].tolist())
                        logits.append(0.3 * product - float(slopes[s % 2, g]) * amount)
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                expected = weights @ values[s, : len(logits)].double()
                assert_close(found[s, g, i], expected.float(), torch.float32)
