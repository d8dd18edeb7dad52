"""Every policy against its oracle, through one matrix of shapes."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offline.gathered_kv import GatheredKV
from tests.policies import oracles
from tests.policies.cases import (
    NUM_LAYERS,
    POLICIES,
    Shape,
    headkv_scores,
    make_pipeline,
    make_view,
    rows_of,
    triattention_statistics,
)
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.policies.duoattention import DuoAttention

CASES_PER_POLICY = 24
MEASURED = ("duoattention", "headkv", "triattention")  # tell heads apart


def shapes_for(policy: str) -> list[tuple[Shape, float]]:
    """Shapes and kept shares: a sample of the whole matrix, each policy another one.

    Block sizes 4, 16 and 32; 1, 2 and 4 queries per KV head; every tail from none to all but one
    token (odd prompt lengths); prompts shorter than the window; ragged heads.
    """
    rng = random.Random(policy)
    pages = {
        4: [(1, 1), (9, 9), (12, 12, 12), (3, 11), (10, 1, 6), (8,)],
        16: [(1, 1), (4, 4), (1, 5), (3, 2, 4)],
        32: [(1, 1), (3, 3), (1, 3)],
    }
    shared = policy == "tova"  # its heads never become ragged
    every = [
        Shape(counts, tail, size, group, layer)
        for size, options in pages.items()
        for counts in options
        if not shared or len(set(counts)) == 1
        for tail, group, layer in itertools.product(range(size), (1, 2, 4), range(3))
    ]
    sample = [
        pick
        for size in pages
        for pick in rng.sample([s for s in every if s.block_size == size], CASES_PER_POLICY // 3)
    ]
    kept = [0.01, 0.3, 0.5, 0.75, 1.0]
    return [(shape, kept[i % len(kept)]) for i, shape in enumerate(sample)]


def kept_by_oracle(
    policy: str, pipeline: Pipeline, view: LayerView, total: int
) -> tuple[list[int], list[list[int]]]:
    params: dict[str, Any] = dict(pipeline.params)
    profile: Any = None
    if policy == "duoattention":
        assert isinstance(pipeline.scorer, DuoAttention)  # which is as it was read
        profile, params["sinks"] = pipeline.scorer.gates, pipeline.scorer.num_sinks
        params["few"] = math.ceil((params["sinks"] + pipeline.scorer.num_recent) / view.block_size)
    elif policy == "triattention":
        group = view.queries.shape[1] // view.num_heads
        table = triattention_statistics(NUM_LAYERS, view.num_heads * group)[view.layer]
        params["statistics"] = table.unflatten(0, (-1, group)).tolist()
    elif "headkv" in policy.split("+"):
        group = view.queries.shape[1] // view.num_heads
        measured = headkv_scores(NUM_LAYERS, view.num_heads * group)
        # No head of so few gets ten times the mean, so keyspans squares their importance.
        power = 2 if policy.startswith("keyspans") else 1
        rows = [[(sum(scores) / len(scores)) ** power for scores in row] for row in measured]
        means = [
            [sum(row[i : i + group]) / group for i in range(0, len(row), group)] for row in rows
        ]
        importance = sum(sum(row) for row in means)
        profile = [[value / importance for value in row] for row in means]
    return oracles.compress(policy, view, total, params, profile)


def check_selection(selection: Selection, view: LayerView, total: int) -> list[list[int]]:
    """Checks what holds for every policy; returns the kept entries by head."""
    counts = selection.page_counts.tolist()
    assert selection.page_counts.dtype == torch.int64
    assert selection.kept_indices.dtype == torch.int64
    assert sum(counts) == total
    kept = rows_of(selection.kept_indices, counts, view.block_size)
    for head, row in enumerate(kept):
        assert row == sorted(set(row))
        assert all(0 <= entry < int(view.lengths[head]) for entry in row)
    return kept


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_keeps_what_its_oracle_keeps(policy: str, tmp_path: Path) -> None:
    for number, (shape, share) in enumerate(shapes_for(policy)):
        pipeline = make_pipeline(policy, shape, tmp_path)
        view = make_view(shape, pipeline.needs.window_size)
        total = max(len(shape.pages), math.floor(share * sum(shape.pages)))
        kept = check_selection(compress_layer(pipeline, view, total), view, total)
        counts, expected = kept_by_oracle(policy, pipeline, view, total)
        where = f"case {number}: {shape}, {total} pages"
        assert [len(row) // shape.block_size for row in kept] == counts, where
        assert kept == expected, where


@pytest.mark.parametrize("policy", POLICIES)
def test_every_page_budget_keeps_what_the_oracle_keeps(policy: str, tmp_path: Path) -> None:
    """From one page per head to all; keeping all is the identity."""
    shape = Shape(pages=(7, 7), tail=3, group=2, seed=5)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    for total in range(2, 15):
        kept = check_selection(compress_layer(pipeline, view, total), view, total)
        assert kept == kept_by_oracle(policy, pipeline, view, total)[1]
    assert kept == [list(range(28)), list(range(28))]


@pytest.mark.parametrize("policy", POLICIES)
def test_keeping_all_of_ragged_heads_is_the_identity(policy: str, tmp_path: Path) -> None:
    shape = Shape(pages=(2, 5), tail=1)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    kept = check_selection(compress_layer(pipeline, view, 7), view, 7)
    assert kept == [list(range(8)), list(range(20))]


@pytest.mark.parametrize("policy", POLICIES)
def test_keeping_all_of_what_was_kept_changes_nothing(policy: str, tmp_path: Path) -> None:
    """A second event with the same budget and nothing new is the identity."""
    shape = Shape(pages=(6, 6), tail=2, seed=3)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    first = compress_layer(pipeline, view, 6)
    counts = tuple(first.page_counts.tolist())
    again = make_view(Shape(pages=counts, tail=2, seed=4), pipeline.needs.window_size)
    second = compress_layer(pipeline, again, 6)
    assert tuple(second.page_counts.tolist()) == counts
    assert all(
        row == list(range(count * 4))
        for row, count in zip(rows_of(second.kept_indices, counts, 4), counts, strict=True)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_sixteen_bit_caches_keep_nearly_the_same(policy: str, tmp_path: Path) -> None:
    shape = Shape(pages=(12, 12), tail=1, seed=9)
    pipeline = make_pipeline(policy, shape, tmp_path)
    window = pipeline.needs.window_size
    wide = compress_layer(pipeline, make_view(shape, window), 12)
    narrow = compress_layer(pipeline, make_view(shape, window, torch.bfloat16), 12)
    rows = [rows_of(s.kept_indices, s.page_counts.tolist(), 4) for s in (wide, narrow)]
    same = sum(len(set(a) & set(b)) for a, b in zip(*rows, strict=True))
    assert same >= 0.8 * 48


@pytest.mark.parametrize("policy", [p for p in POLICIES if not any(name in p for name in MEASURED)])
def test_permuting_heads_permutes_what_they_keep(policy: str, tmp_path: Path) -> None:
    shape = Shape(pages=(9, 9), tail=1, seed=13)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    order = torch.tensor([1, 0])
    queries = view.queries.unflatten(1, (2, 2))[:, order].flatten(1, 2)
    assert view.output_weight is not None
    assert view.output_root is not None
    swapped = replace(
        view,
        kv=GatheredKV(
            view.lengths[order],
            (view.kv.keys()[order], view.kv.values()[order]),
            (view.kv.tail_keys()[order], view.kv.tail_values()[order]),
        ),
        queries=queries,
        output_weight=view.output_weight[order],
        output_root=view.output_root.unflatten(0, (2, 2))[order].flatten(0, 1),
    )
    rows = check_selection(compress_layer(pipeline, view, 8), view, 8)
    other = check_selection(compress_layer(pipeline, swapped, 8), swapped, 8)
    assert other == rows[::-1]


@pytest.mark.parametrize("policy", ["keydiff", "knorm", "tova"])
def test_of_equal_entries_the_later_stay(policy: str, tmp_path: Path) -> None:
    shape = Shape(pages=(6, 6), tail=0)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    view.kv.keys().fill_(1.0)
    selection = compress_layer(pipeline, view, 6)
    assert rows_of(selection.kept_indices, [3, 3], 4) == [list(range(12, 24))] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_ties_are_broken_the_same_way_every_time(policy: str, tmp_path: Path) -> None:
    shape = Shape(pages=(6, 6), tail=0)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    view.kv.keys().fill_(1.0)
    view.kv.values().fill_(1.0)
    first, second = (compress_layer(pipeline, view, 6) for _ in range(2))
    assert torch.equal(first.kept_indices, second.kept_indices)
    assert torch.equal(first.page_counts, second.page_counts)


@pytest.mark.parametrize("policy", ["snapkv", "adakv", "h2o", "tova", "snapkv+criticalkv"])
def test_scores_that_are_not_finite_give_a_valid_selection(policy: str, tmp_path: Path) -> None:
    """NaN scores rank last; counts are exact, and entries are in order."""
    shape = Shape(pages=(6, 4), tail=1)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    view.kv.keys()[0, 5] = float("nan")
    check_selection(compress_layer(pipeline, view, 5), view, 5)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "tova", "adakv+criticalkv"])
def test_without_queries_the_most_recent_stay(policy: str, tmp_path: Path) -> None:
    shape = Shape(pages=(6, 6), tail=1)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, 0)
    kept = check_selection(compress_layer(pipeline, view, 6), view, 6)
    assert all(set(range(20, 24)) <= set(row) for row in kept)
