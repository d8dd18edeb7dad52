"""Entries that a head keeps: protected ones, CriticalKV's two stages, small budgets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.policies import oracles
from tests.policies.cases import POLICIES, Shape, make_pipeline, make_view, rows_of
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.kernels.top_entries import sortable, top_entries
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.criticalkv import CriticalKV
from vllm_kvcompress.policies.parts.selection import (
    NOTHING_PROTECTED,
    Protection,
    Selector,
    best_of_spans,
)

SHAPE = Shape(pages=(8, 8), tail=1, group=2)


def scores_for(view: LayerView, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(view.valid.shape, generator=generator)


# --- ranking ----------------------------------------------------------------------------------


NUMBERS = st.one_of(st.just(float("nan")), st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0]))


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_sortable_numbers_sort_as_scores_do(values: list[float]) -> None:
    keys = sortable(torch.tensor([values]))[0].tolist()
    ranks = sorted(range(len(values)), key=keys.__getitem__)
    lowest = float("-inf")
    expected = sorted(
        range(len(values)), key=lambda i: (lowest if values[i] != values[i] else values[i], i)
    )
    assert ranks == expected


@given(num_kept=st.integers(0, 12), seed=st.integers(0, 99))
def test_top_entries_are_the_highest_and_of_equals_the_later(num_kept: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (1, 12), generator=generator).float()
    kept = top_entries(scores, torch.ones(1, 12, dtype=torch.bool), torch.tensor([num_kept]))
    expected = oracles.best(list(range(12)), scores[0].tolist(), num_kept)
    assert kept[0].nonzero()[:, 0].tolist() == sorted(expected)


# --- protection -------------------------------------------------------------------------------


@given(
    sinks=st.integers(0, 20),
    recent=st.integers(0, 20),
    share=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    tail=st.integers(0, 3),
    pages=st.integers(0, 8),
)
def test_protection_is_that_of_the_loop(
    sinks: int, recent: int, share: float, tail: int, pages: int
) -> None:
    view = make_view(Shape(pages=(8,), tail=tail), 1)
    protection = Protection(sinks, recent, share)
    mask = protection.mask(view, torch.tensor([pages * 4]))
    head = oracles.heads_of(view)[0]
    expected = oracles.protected(head, pages * 4, sinks, recent, share)
    assert set(mask[0].nonzero()[:, 0].tolist()) == expected
    assert len(expected) <= pages * 4


@given(
    bounds=st.lists(st.integers(0, 47), max_size=8, unique=True),
    sinks=st.integers(0, 6),
    recent=st.integers(0, 9),
    pages=st.tuples(st.integers(0, 8), st.integers(0, 5)),
    resident=st.booleans(),
    part=st.sampled_from([None, 0.1, 0.25, 0.7]),
    seed=st.integers(0, 99),
)
def test_best_of_spans_are_those_of_the_loop(
    bounds: list[int],
    sinks: int,
    recent: int,
    pages: tuple[int, int],
    resident: bool,
    part: float | None,
    seed: int,
) -> None:
    """The best by score of each span, at a first event, and where earlier ones left gaps.

    A given part is that of one span, the prompt.
    """
    ends = sorted(bounds)[: len(bounds) // 2 * 2 if part is None else 2]
    ends = ends[: len(ends) // 2 * 2]
    spans = list(zip(ends[::2], ends[1::2], strict=True))
    num_read = 48 if resident else 32
    spans = [(min(start, num_read), min(end, num_read)) for start, end in spans]
    view = make_view(Shape(pages=(8, 5), tail=1), 1)
    draw = torch.Generator().manual_seed(seed)
    positions = [sorted(torch.randperm(48, generator=draw)[:32].tolist()) for _ in range(2)]
    if resident:
        view = replace(view, entries=replace(view.entries, positions=torch.tensor(positions)))
    else:
        positions = [list(range(32))] * 2
    view = replace(view, shared_spans=torch.tensor([[(0, num_read), *spans]]))
    scores, kept = scores_for(view, seed), [4 * count for count in pages]
    mask = best_of_spans(view, scores, torch.tensor(kept), Protection(sinks, recent), part)
    for number, head in enumerate(oracles.heads_of(view)):
        own = 0  # tokens that a given part has before the policy's sinks and recent ones
        if part is not None and spans:
            ((start, end),) = spans
            own = min(kept[number], math.ceil(round(part * (end - start), 6)))
        expected = oracles.protected(head, kept[number] - own, sinks, recent, 0.0)
        free = kept[number] - len(expected)
        others = [entry for entry in range(head.size) if entry not in expected]
        for start, end in spans:
            inside = [entry for entry in others if start <= positions[number][entry] < end]
            share = (end - start) * free // num_read
            share = share if part is None else own
            expected |= set(oracles.best(inside, scores[number].tolist(), min(share, len(inside))))
        assert set(mask[number].nonzero()[:, 0].tolist()) == expected
        assert len(expected) <= kept[number]


def test_small_budgets_shrink_recent_tokens_then_sinks() -> None:
    view = make_view(Shape(pages=(8,), tail=0), 1)
    bounds = Protection(num_sinks=3, num_recent=6).bounds(view, torch.tensor([4]))
    assert [int(b) for b in bounds] == [3, 1]
    bounds = Protection(num_sinks=9, num_recent=6).bounds(view, torch.tensor([4]))
    assert [int(b) for b in bounds] == [3, 1]


def test_the_tail_counts_as_recent() -> None:
    view = make_view(Shape(pages=(8,), tail=3), 1)
    bounds = Protection(num_sinks=9, num_recent=5).bounds(view, torch.tensor([4]))
    assert [int(b) for b in bounds] == [4, 0]
    bounds = Protection(num_recent=5).bounds(view, torch.tensor([8]))
    assert [int(b) for b in bounds] == [0, 2]


@pytest.mark.parametrize(
    "policy", [p for p in POLICIES if p.startswith(("snapkv", "adakv", "pyramidkv", "headkv"))]
)
@pytest.mark.parametrize("tail", [0, 1, 3])
def test_the_window_is_always_kept(policy: str, tail: int, tmp_path: Path) -> None:
    """The window includes the partial block; each head has room for it (two pages)."""
    shape = replace(SHAPE, tail=tail)
    pipeline = make_pipeline(policy, shape, tmp_path)
    view = make_view(shape, pipeline.needs.window_size)
    selection = compress_layer(pipeline, view, 5)
    window = int(pipeline.params["window_size"])
    for row in rows_of(selection.kept_indices, selection.page_counts.tolist(), 4):
        assert set(range(32 + tail - window, 32)) <= set(row)


@pytest.mark.parametrize("total", [2, 7, 12, 16])
def test_streamingllm_keeps_sinks_and_the_latest(total: int, tmp_path: Path) -> None:
    shape = Shape(pages=(8, 8), tail=2)
    pipeline = make_pipeline("streamingllm", shape, tmp_path, num_sinks=3)
    selection = compress_layer(pipeline, make_view(shape, 0), total)
    counts = selection.page_counts.tolist()
    for row, count in zip(rows_of(selection.kept_indices, counts, 4), counts, strict=True):
        assert row == [0, 1, 2, *range(32 - (4 * count - 3), 32)]


def test_streamingllm_depends_on_positions_alone(tmp_path: Path) -> None:
    pipeline = make_pipeline("streamingllm", SHAPE, tmp_path)
    kept = [
        compress_layer(pipeline, make_view(replace(SHAPE, seed=seed), 0), 6).kept_indices
        for seed in (1, 2)
    ]
    assert torch.equal(*kept)


def test_h2o_that_keeps_only_recent_tokens_is_a_sliding_window(tmp_path: Path) -> None:
    pipeline = make_pipeline("h2o", SHAPE, tmp_path, recent_fraction=1.0)
    selection = compress_layer(pipeline, make_view(SHAPE, 9), 8)
    assert rows_of(selection.kept_indices, [4, 4], 4) == [list(range(16, 32))] * 2


def test_duo_without_retrieval_heads_is_streamingllm(tmp_path: Path) -> None:
    duo = make_pipeline("duoattention", SHAPE, tmp_path)
    num_sinks = duo.protection.num_sinks
    streaming = make_pipeline("streamingllm", SHAPE, tmp_path, num_sinks=num_sinks)
    view = make_view(SHAPE, 0)
    few = compress_layer(duo, view, 4)
    assert torch.equal(few.kept_indices, compress_layer(streaming, view, 4).kept_indices)


@pytest.mark.parametrize("factor", [0.001, 1000.0])
def test_snapkv_does_not_depend_on_the_scale_of_scores(factor: float) -> None:
    view = make_view(SHAPE, 0)
    scores, kept = scores_for(view), torch.tensor([12, 16])
    protection = Protection(num_recent=5)
    plain = Selector().select(view, scores, kept, protection)
    assert torch.equal(Selector().select(view, scores * factor, kept, protection), plain)


def test_snapkv_without_pooling_is_the_top_of_the_mass(tmp_path: Path) -> None:
    pipeline = make_pipeline("snapkv", SHAPE, tmp_path, kernel_size=1)
    view = make_view(SHAPE, 5)
    rows = rows_of(compress_layer(pipeline, view, 8).kept_indices, [4, 4], 4)
    for row, head in zip(rows, oracles.heads_of(view), strict=True):
        window = set(range(28, 32))
        others = [j for j in range(32) if j not in window]
        assert set(row) == window | set(oracles.best(others, oracles.mass(head), 12))


def test_attention_leaves_a_head_of_two_pages_its_first_tokens(tmp_path: Path) -> None:
    """Where `snapkv` would keep its window and nothing else."""
    view = make_view(SHAPE, 5)
    attention = make_pipeline("attention", SHAPE, tmp_path, num_sinks=2, num_recent=5)
    snapkv = make_pipeline("snapkv", SHAPE, tmp_path, window_size=9)
    for pipeline, least in ((attention, {0, 1, *range(28, 32)}), (snapkv, set(range(24, 32)))):
        for row in rows_of(compress_layer(pipeline, view, 4).kept_indices, [2, 2], 4):
            assert least <= set(row)
            assert (0 in row) == (pipeline is attention)


# --- criticalkv -------------------------------------------------------------------------------


def two_stage(
    view: LayerView, scores: torch.Tensor, kept: torch.Tensor, **settings: object
) -> torch.Tensor:
    selector = replace(CriticalKV(), **settings)  # type: ignore[arg-type]
    return selector.select(view, scores, kept, NOTHING_PROTECTED)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_constant_value_norms_give_the_plain_top(norm: str) -> None:
    view = make_view(SHAPE, 0)
    view.kv.values().fill_(1.0)
    scores, kept = scores_for(view), torch.tensor([9, 20])
    plain = Selector().select(view, scores, kept, NOTHING_PROTECTED)
    assert torch.equal(two_stage(view, scores, kept, norm=norm), plain)


def test_one_stage_is_the_plain_top() -> None:
    view = make_view(SHAPE, 0)
    scores, kept = scores_for(view), torch.tensor([9, 20])
    plain = Selector().select(view, scores, kept, NOTHING_PROTECTED)
    assert torch.equal(two_stage(view, scores, kept, alpha=1.0), plain)
    assert not torch.equal(two_stage(view, scores, kept, alpha=0.0), plain)


@given(alpha=st.floats(0, 1), seed=st.integers(0, 99), count=st.integers(0, 32))
def test_the_first_stage_is_kept_and_the_count_is_exact(
    alpha: float, seed: int, count: int
) -> None:
    view = make_view(SHAPE, 0)
    scores, kept = scores_for(view, seed), torch.tensor([count, 32 - count])
    mask = two_stage(view, scores, kept, alpha=alpha)
    assert mask.sum(dim=1).tolist() == [count, 32 - count]
    first = (kept * alpha).floor().long()
    sure = Selector().select(view, scores, first, NOTHING_PROTECTED)
    assert bool((mask | ~sure).all())


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_the_scale_of_the_output_weight_changes_nothing(norm: str, epsilon: float) -> None:
    view = make_view(SHAPE, 0)
    assert view.output_weight is not None
    assert view.output_root is not None
    larger = replace(view, output_weight=view.output_weight * 8, output_root=view.output_root * 8)
    scores, kept = scores_for(view), torch.tensor([9, 20])
    plain = two_stage(view, scores, kept, norm=norm, epsilon=epsilon)
    assert torch.equal(two_stage(larger, scores, kept, norm=norm, epsilon=epsilon), plain)


def test_second_stage_skips_values_that_the_output_projection_ignores() -> None:
    """A value that the output projection maps to 0 has a norm of 0."""
    view = make_view(SHAPE, 0)
    scores, kept = torch.full((2, 32), 0.5), torch.tensor([8, 8])
    view.kv.values()[:, 20:] = 0.0
    mask = two_stage(view, scores, kept, alpha=0.0)
    assert not mask[:, 20:].any()
    # With equal scores the first stage takes the later ones, whatever their values.
    assert int(two_stage(view, scores, kept, alpha=0.5)[:, 20:].sum()) == 8
