"""Budgets of layers and heads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.cases import POLICIES, Shape, make_pipeline, make_view
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.adakv import Ada
from vllm_kvcompress.policies.base import LayerView, ModelHeads
from vllm_kvcompress.policies.duoattention import DuoAttention
from vllm_kvcompress.policies.headkv import ByImportance, HeadKV
from vllm_kvcompress.policies.knorm import KNorm
from vllm_kvcompress.policies.merging.d2o import D2O
from vllm_kvcompress.policies.parts.allocation import UNIFORM, Allocator
from vllm_kvcompress.policies.parts.selection import Protection
from vllm_kvcompress.policies.pyramidkv import PyramidKV

EQUAL_TABLE = ((1 / 8,) * 2,) * 4
TABLE = ((0.3, 0.1), (0.05, 0.05), (0.25, 0.15), (0.1, 0.0))
GATES = ((0.9, 0.1), (0.2, 0.3), (1.0, 0.8), (0.0, 0.05))
ALLOCATORS: list[Allocator] = [
    UNIFORM,
    KNorm(skip_layers=2),
    PyramidKV(window_size=8, beta=20.0, block_size=4),
    PyramidKV(window_size=64, beta=3.0, block_size=16),
    Ada(),
    HeadKV(importance=TABLE, block_size=4),
    HeadKV(importance=EQUAL_TABLE, beta=2.0, block_size=4),
    DuoAttention(gates=GATES, num_sinks=2, num_recent=8, block_size=4),
    DuoAttention(gates=GATES, num_sinks=100, num_recent=300, block_size=4),
]


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=lambda each: type(each).__name__)
@given(num_full=st.integers(1, 40), data=st.data())
def test_layer_totals_are_exact_through_any_events(
    allocator: Allocator, num_full: int, data: st.DataObject
) -> None:
    """Several events in a row, each with more tokens and another budget."""
    num_heads, num_layers = 2, 4
    capacity, logical, resident = [num_full * num_heads] * num_layers, num_full, num_full
    for _ in range(3):
        num_blocks = data.draw(st.integers(1, resident))
        pages = allocator.layer_pages(num_blocks, capacity, num_heads, logical)
        assert all(isinstance(count, int) for count in pages)
        assert sum(pages) == num_blocks * num_heads * num_layers
        assert all(0 <= count <= most for count, most in zip(pages, capacity, strict=True))
        more = data.draw(st.integers(0, 9))
        capacity = [count + more * num_heads for count in pages]
        logical, resident = logical + more, num_blocks + more


def head_pages(
    allocator: Allocator, view: LayerView, scores: torch.Tensor, total: int, floor: int
) -> torch.Tensor:
    """Pages of one request's heads."""
    return allocator.head_pages(view, scores, torch.tensor([total]), torch.tensor([floor]))


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=lambda each: type(each).__name__)
@given(
    counts=st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(any),
    floor=st.integers(0, 5),
    layer=st.integers(0, 3),
    data=st.data(),
)
def test_head_totals_are_exact(
    allocator: Allocator, counts: list[int], floor: int, layer: int, data: st.DataObject
) -> None:
    shape = Shape(pages=tuple(counts), layer=layer)
    if getattr(allocator, "block_size", 4) == 16:
        shape = Shape(pages=tuple(counts), layer=layer, block_size=16)
    view = make_view(shape, 0)
    scores = torch.rand(2, view.num_entries, generator=torch.Generator().manual_seed(layer))
    total = data.draw(st.integers(0, sum(counts)))
    pages = head_pages(allocator, view, scores, total, floor)
    assert pages.dtype == torch.int64
    assert int(pages.sum()) == total
    least = [min(floor, total // 2, count) for count in counts]
    for low, page, high in zip(least, pages.tolist(), counts, strict=True):
        assert 0 <= page <= high
        if not isinstance(allocator, DuoAttention):
            assert page >= low


# --- uniform and skipped layers ---------------------------------------------------------------


def test_skipped_layers_keep_everything_at_the_cost_of_others() -> None:
    pages = KNorm(skip_layers=2).layer_pages(20, [80] * 8, 2)
    assert pages == [80, 80, 27, 27, 27, 27, 26, 26]
    assert sum(pages) == 20 * 2 * 8


def test_fewer_layers_are_skipped_where_the_others_would_starve() -> None:
    assert KNorm(skip_layers=2).layer_pages(3, [200] * 4, 2) == [6, 6, 6, 6]
    # Two whole layers would leave 2 pages for each of the others, less than half of 12.
    assert KNorm(skip_layers=2).layer_pages(6, [22] * 4, 2) == [22, 9, 9, 8]


# --- pyramid ----------------------------------------------------------------------------------


@given(num_blocks=st.integers(1, 60), extra=st.integers(0, 200), beta=st.floats(1, 50))
def test_pyramid_never_rises(num_blocks: int, extra: int, beta: float) -> None:
    full = num_blocks + extra
    pages = PyramidKV(window_size=8, beta=beta, block_size=4).layer_pages(num_blocks, [full] * 6, 1)
    assert pages == sorted(pages, reverse=True)


def test_pyramid_is_the_paper_s_line() -> None:
    """c = 30 - 2 = 28, min = 28 / 7 = 4, max = 2 * 28 - 4 = 52; from 54 to 6 pages in 4 steps."""
    pyramid = PyramidKV(window_size=8, beta=7.0, block_size=4)
    assert pyramid.layer_pages(30, [200 * 3] * 5, 3) == [162, 126, 90, 54, 18]


def test_pyramid_stops_at_the_prompt() -> None:
    """max = n - w = 38, min = 2 * 28 - 38 = 18: from 40 to 20 pages."""
    pyramid = PyramidKV(window_size=8, beta=7.0, block_size=4)
    assert pyramid.layer_pages(30, [40] * 5, 1) == [40, 35, 30, 25, 20]


@given(num_blocks=st.integers(1, 40))
def test_pyramid_without_slope_is_uniform(num_blocks: int) -> None:
    pyramid = PyramidKV(window_size=8, beta=1.0, block_size=4)
    assert pyramid.layer_pages(num_blocks, [90] * 5, 2) == [2 * num_blocks] * 5


def test_a_pipeline_stage_has_its_part_of_the_pyramid() -> None:
    """It has the last three of 54, 42, 30, 18, 6, scaled to its own 90 pages of a head."""
    pyramid = PyramidKV(window_size=8, beta=7.0).bind(ModelHeads(3, 1, 1, 4, first_layer=2))
    assert pyramid.layer_pages(30, [200] * 3, 1) == [50, 30, 10]
    first = PyramidKV(window_size=8, beta=7.0).bind(ModelHeads(2, 1, 1, 4, later_layers=3))
    assert sum(first.layer_pages(30, [200] * 2, 1)) == 60
    assert first.layer_pages(30, [200] * 2, 1) == [34, 26]  # 54 to 42, scaled to 60


def test_a_pipeline_stage_skips_the_model_s_first_layers_alone() -> None:
    model = ModelHeads(3, 1, 1, 4, first_layer=1)
    assert (KNorm(skip_layers=2).bind(model).skip_layers, KNorm().bind(model).skip_layers) == (1, 1)
    d2o = resolve("d2o", {"skip_layers": 3}).bind(3, 1, 1, 4, first_layer=2).merger
    assert isinstance(d2o, D2O)
    assert d2o.skip_layers == 1


def test_pyramid_of_one_layer_gets_the_budget() -> None:
    assert PyramidKV(block_size=4).layer_pages(3, [9], 1) == [3]


# --- ada --------------------------------------------------------------------------------------


def ada_view(num_heads: int = 4, pages: int = 12) -> tuple[LayerView, torch.Tensor]:
    view = make_view(Shape(pages=(pages,) * num_heads), 0)
    scores = torch.rand(num_heads, pages * 4, generator=torch.Generator().manual_seed(6))
    return view, scores * torch.arange(1, num_heads + 1)[:, None]


@pytest.mark.parametrize("mode", ["blend", "floor"])
def test_equal_heads_get_equal_budgets(mode: str) -> None:
    view, scores = ada_view()
    pages = head_pages(Ada(safeguard_mode=mode), view, scores[:1].expand_as(scores), 20, 0)
    assert pages.tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("mode", ["blend", "floor"])
def test_a_full_safeguard_is_uniform(mode: str) -> None:
    view, scores = ada_view()
    assert head_pages(Ada(1.0, mode), view, scores, 20, 0).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("mode", ["blend", "floor"])
@given(phi=st.floats(0, 1), total=st.integers(4, 48))
def test_the_safeguard_holds_to_the_page(mode: str, phi: float, total: int) -> None:
    view, scores = ada_view()
    pages = head_pages(Ada(phi, mode), view, scores, total, 0)
    assert int(pages.min()) * 4 > phi * total - 4 - 1


@given(total=st.integers(4, 48), seed=st.integers(0, 99))
def test_ada_keeps_at_least_the_mass_of_uniform_to_the_page(total: int, seed: int) -> None:
    view, _ = ada_view()
    scores = torch.rand(4, 48, generator=torch.Generator().manual_seed(seed))
    scores *= torch.tensor([1.0, 2.0, 5.0, 9.0])[:, None]

    def mass(allocator: Allocator) -> float:
        pages = head_pages(allocator, view, scores, total, 0).tolist()
        ranked = scores.sort(dim=1, descending=True).values
        return sum(float(row[: count * 4].sum()) for row, count in zip(ranked, pages, strict=True))

    # Rounding moves less than a page per head, each token at most the highest score.
    assert mass(Ada(0.0, "floor")) >= mass(UNIFORM) - 4 * 4 * 9.0 / 2


def test_heads_with_the_best_entries_get_more() -> None:
    view, scores = ada_view()
    pages = head_pages(Ada(0.2, "blend"), view, scores, 20, 1).tolist()
    assert pages == sorted(pages)
    assert pages[-1] > pages[0]


def test_protected_entries_do_not_compete() -> None:
    """Heads that differ only in their windows stay equal, unless these compete."""
    view, scores = ada_view()
    scores = scores[:1].expand_as(scores).clone()
    scores[0, -8:] = 9.0
    protection = Protection(num_recent=8)
    assert (
        head_pages(Ada(0.0, "floor", protection=protection), view, scores, 20, 2).tolist()
        == [5] * 4
    )
    assert int(head_pages(Ada(0.0, "floor"), view, scores, 20, 2)[0]) > 5


# --- headkv -----------------------------------------------------------------------------------


def all_pages(allocator: Allocator, num_blocks: int, full: int) -> list[list[int]]:
    """Pages of every layer and head at a first event of 4 layers with 2 heads."""
    layers = allocator.layer_pages(num_blocks, [full * 2] * 4, 2, full)
    rows = []
    for layer, total in enumerate(layers):
        view = make_view(Shape(pages=(full, full), layer=layer), 0)
        rows.append(head_pages(allocator, view, torch.zeros(2, full * 4), total, 0).tolist())
    return rows


def test_headkv_is_the_formula() -> None:
    """Window 2 pages, c = 20, pool = 20 / 2 * 8 = 80 pages, everyone 10: 12 + score * 80."""
    allocator = HeadKV(importance=TABLE, beta=2.0, window_size=8, block_size=4)
    assert all_pages(allocator, 22, 100) == [[36, 20], [16, 16], [32, 24], [20, 12]]


def test_headkv_pools_budgets_beyond_the_window() -> None:
    """Window 10 pages, c = 12: layers of score 0.4 get 20 + 2 * 6 + 0.4 * 48 = 51.2 pages."""
    allocator = HeadKV(importance=TABLE, beta=2.0, window_size=40, block_size=4)
    assert allocator.layer_pages(22, [200] * 4, 2) == [51, 37, 51, 37]


def test_headkv_gives_others_what_full_heads_cannot_hold() -> None:
    allocator = HeadKV(importance=TABLE, beta=2.0, window_size=8, block_size=4)
    rows = all_pages(allocator, 22, 30)
    assert sum(map(sum, rows)) == 22 * 8
    assert rows[0] == [30, 26]


@given(num_blocks=st.integers(1, 50), beta=st.floats(1, 100))
def test_headkv_of_equal_heads_is_uniform(num_blocks: int, beta: float) -> None:
    allocator = HeadKV(importance=EQUAL_TABLE, beta=beta, window_size=8, block_size=4)
    assert all_pages(allocator, num_blocks, 50) == [[num_blocks] * 2] * 4


def test_headkv_without_a_pool_is_uniform() -> None:
    allocator = HeadKV(importance=TABLE, beta=1e9, window_size=8, block_size=4)
    assert all_pages(allocator, 10, 50) == [[10, 10]] * 4


def test_headkv_on_other_policies_divides_over_the_whole_model() -> None:
    """Shares of the mean are a half and four times the importance; full heads hand on to all."""
    table = ((0.5, 0.1), (0.0, 0.0), (0.2, 0.0), (0.1, 0.1))
    bound = ByImportance(importance=table, even_share=0.5).bind(ModelHeads(4, 2, 2, 4))
    assert bound.importance[0] == (pytest.approx(2.5), pytest.approx(0.9))
    assert all_pages(bound, 10, 100) == [[25, 9], [5, 5], [13, 5], [9, 9]]
    # 30 pages for two full heads; the others' 4.2 shares divide 50: 10.7 and 5.95 pages.
    assert all_pages(bound, 10, 15) == [[15, 11], [6, 6], [15, 6], [11, 10]]


def test_headkv_on_other_policies_raises_importance_to_a_power() -> None:
    """Each query head's, before their sum: 0.4 and 0.2 of a KV head make 0.16 + 0.04."""
    table = ((0.4, 0.2, 0.1, 0.1), (0.0, 0.2, 0.0, 0.0))
    policy = ByImportance(importance=table, even_share=0.0, temperature=2.0)
    bound = policy.bind(ModelHeads(num_layers=2, num_kv_heads=2, num_query_heads=4, block_size=4))
    shares = [0.20 / 0.26 * 4, 0.02 / 0.26 * 4, 0.04 / 0.26 * 4, 0.0]
    assert [share for row in bound.importance for share in row] == pytest.approx(shares)


SIX_HEADS = ((0.4, 0.2, 0.1, 0.1), (0.0, 0.2, 0.0, 0.0), (0.1, 0.1, 0.2, 0.2))


@pytest.mark.parametrize(("peak", "power"), [(0.0, 1.0), (2.0, 1.0), (2.6, 1.5), (5.0, 2.0)])
def test_headkv_on_other_policies_sharpens_until_a_head_has_its_peak(
    peak: float, power: float
) -> None:
    """The first of six KV heads gets 2.1 times the mean, 2.6 with a power of 1.5, 3.1 at most."""
    groups = [(0.4, 0.2), (0.1, 0.1), (0.0, 0.2), (0.0, 0.0), (0.1, 0.1), (0.2, 0.2)]
    powered = [sum(score**power for score in group) for group in groups]
    expected = [0.1 + 0.9 * value * 6 / sum(powered) for value in powered]
    policy = ByImportance(importance=SIX_HEADS, even_share=0.1, peak=peak)
    bound = policy.bind(ModelHeads(num_layers=3, num_kv_heads=2, num_query_heads=4, block_size=4))
    shares = [share for row in bound.importance for share in row]
    assert shares == pytest.approx(expected)


def test_headkv_on_other_policies_sharpens_alike_on_all_ranks() -> None:
    """The second rank has no head with as much, and takes the power that the first one's needs."""
    policy = ByImportance(importance=SIX_HEADS, even_share=0.0, peak=2.75)
    rank = ModelHeads(3, num_kv_heads=1, num_query_heads=2, block_size=4, tp_rank=1, tp_size=2)
    powered = [2 * 0.1**1.5, 0.0, 2 * 0.2**1.5]
    shares = [share for row in policy.bind(rank).importance for share in row]
    assert shares == pytest.approx([value * 3 / sum(powered) for value in powered])


@given(num_blocks=st.integers(1, 50), even=st.floats(0, 1))
def test_headkv_of_equal_heads_is_uniform_on_other_policies(num_blocks: int, even: float) -> None:
    equal = ByImportance(importance=EQUAL_TABLE, even_share=even).bind(ModelHeads(4, 2, 2, 4))
    assert all_pages(equal, num_blocks, 50) == [[num_blocks] * 2] * 4


# --- duoattention -----------------------------------------------------------------------------


def duo(few_tokens: int = 10) -> DuoAttention:
    return DuoAttention(gates=GATES, num_sinks=2, num_recent=few_tokens - 2, block_size=4)


def test_duo_gives_everything_to_the_highest_gates() -> None:
    """3 pages for all; (10 - 3) * 8 = 56 more: two heads take 20 - 3, the third 17, then 5."""
    assert all_pages(duo(), 10, 20) == [[20, 3], [3, 8], [20, 20], [3, 3]]


def test_duo_with_room_for_all_keeps_all() -> None:
    assert all_pages(duo(), 20, 20) == [[20, 20]] * 4


def test_duo_without_room_for_retrieval_heads_streams_all() -> None:
    assert all_pages(duo(), 3, 20) == [[3, 3]] * 4
    assert all_pages(duo(few_tokens=400), 3, 20) == [[3, 3]] * 4


def test_duo_retrieval_heads_keep_everything_over_several_events() -> None:
    """The same heads, longer by what was generated, with a budget that grows as they do."""
    allocator, pages = duo(), [[20, 3], [3, 3], [20, 20], [3, 3]]
    capacity = [sum(row) + 4 * 2 for row in pages]
    num_blocks = (3 * 24 + 5 * 3) // 8 + 1
    layers = allocator.layer_pages(num_blocks, capacity, 2, 24)
    assert layers[2] == 48
    assert layers[0] >= 27
    view = make_view(Shape(pages=(24, 7), layer=0), 0)
    pages = head_pages(allocator, view, torch.zeros(2, 96), layers[0], 0)
    assert int(pages[0]) == 24


@given(num_blocks=st.integers(1, 30))
def test_duo_streaming_heads_keep_sinks_and_recent_tokens(num_blocks: int) -> None:
    few = min(math.ceil(10 / 4), num_blocks)
    assert all(count >= few for row in all_pages(duo(), num_blocks, 30) for count in row)


# --- all of them, in a pipeline ---------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_differ_only_where_announced(policy: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(policy, Shape(pages=(30, 30)), tmp_path)
    pages = pipeline.allocator.layer_pages(10, [60] * 3, 2, 30)
    assert sum(pages) == 60
    assert (pages != [20, 20, 20]) <= pipeline.layer_dependent
