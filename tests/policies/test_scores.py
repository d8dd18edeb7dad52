"""Scores: the properties that the methods promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offline.gathered_kv import GatheredKV
from tests.policies import oracles
from tests.policies.cases import HEAD_SIZE, Shape, make_view, with_rows, with_state
from vllm_kvcompress.kernels import value_norms
from vllm_kvcompress.kernels.common import tiles
from vllm_kvcompress.kernels.keydiff import keydiff_scores
from vllm_kvcompress.kernels.pooling import max_or_mean_pool
from vllm_kvcompress.kernels.value_norms import output_roots, value_norms_l1, value_norms_l2
from vllm_kvcompress.kernels.window_mass import window_mass
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.knorm import KNorm
from vllm_kvcompress.policies.leverage import leverage
from vllm_kvcompress.policies.obcache import OBCache
from vllm_kvcompress.policies.rkv import RKV
from vllm_kvcompress.policies.snapkv import SnapKV
from vllm_kvcompress.policies.tova import TOVA

shapes = st.builds(
    Shape,
    pages=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    tail=st.integers(0, 3),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)


def mass_of(view: LayerView) -> torch.Tensor:
    return window_mass(view.kv, view.queries, view.scale)


def of_keys(rows: torch.Tensor) -> GatheredKV:
    """A view with these as keys and as values."""
    return GatheredKV.of(rows, rows)


def own(rows: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """Scores by head, without padding."""
    return [row[:length] for row, length in zip(rows, shape.lengths, strict=True)]


@given(shape=shapes, window=st.integers(1, 12))
def test_window_mass_is_that_of_the_loop(shape: Shape, window: int) -> None:
    view = make_view(shape, window)
    for row, head in zip(own(mass_of(view), shape), oracles.heads_of(view), strict=True):
        assert torch.allclose(row.double(), torch.tensor(oracles.mass(head)).double(), atol=1e-6)


@given(shape=shapes, window=st.integers(1, 12))
def test_mass_is_at_most_one(shape: Shape, window: int) -> None:
    rows = own(mass_of(make_view(shape, window)), shape)
    assert all(float(row.sum()) <= 1 + 1e-5 and float(row.min()) >= 0 for row in rows)


def test_mass_of_everything_visible_is_one() -> None:
    """Without a tail all attention goes to the entries."""
    shape = Shape(pages=(4, 4), tail=0)
    rows = mass_of(make_view(shape, 6))
    assert torch.allclose(rows.sum(dim=1), torch.ones(2), atol=1e-5)


def test_tiles_do_not_change_the_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(Shape(pages=(5, 3), tail=3), 11)
    untiled = mass_of(view)
    monkeypatch.setattr(tiles, "HEADS_BYTES", 1)
    assert torch.allclose(mass_of(view)[0], untiled[0], atol=1e-6)
    assert torch.allclose(mass_of(view)[1, :12], untiled[1, :12], atol=1e-6)


def test_tiles_do_not_change_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head also keeps its weights."""
    view = make_view(Shape(pages=(5, 5), tail=3), 1)
    assert view.output_root is not None
    root = view.output_root.unflatten(0, (view.num_heads, -1))
    untiled = value_norms_l2(view.kv, root)
    monkeypatch.setattr(tiles, "HEADS_BYTES", 1)
    assert torch.allclose(value_norms_l2(view.kv, root), untiled, rtol=1e-5)


def test_no_tensor_holds_the_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles, softmax never sees more than a tile's logits for each thread."""
    shape, window = Shape(pages=(16, 16), tail=1, group=2), 24
    monkeypatch.setattr(tiles, "HEADS_BYTES", 4 * 512)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sizes: list[int] = []
    softmax = torch.softmax

    def watched(logits: torch.Tensor, dim: int, out: torch.Tensor) -> torch.Tensor:
        sizes.append(logits.numel())
        return softmax(logits, dim=dim, out=out)

    monkeypatch.setattr(torch, "softmax", watched)
    mass_of(make_view(shape, window))
    assert max(sizes) <= 512 + 8 * window
    assert max(sizes) < 2 * window * 65 // 4


def test_sixteen_bit_inputs_lose_nothing_on_the_way() -> None:
    """Products of bf16 numbers are exact in fp32, and the process keeps its own precision."""
    view = make_view(Shape(pages=(5, 3), tail=3), 11)
    rounded = [t.bfloat16() for t in (view.kv.keys(), view.kv.tail_keys(), view.queries)]

    def mass(keys: torch.Tensor, tail: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        kv = GatheredKV(view.lengths, (keys, keys), (tail, tail))
        return window_mass(kv, queries, view.scale)

    before = torch.backends.mkldnn.matmul.fp32_precision
    narrow = mass(*rounded)
    expected = mass(*[t.double().float() for t in rounded])
    assert torch.allclose(narrow[0], expected[0], atol=1e-6)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_zero_queries_give_zero_mass() -> None:
    assert not mass_of(make_view(Shape(pages=(2, 2)), 0)).any()


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("tail", [0, 3])
def test_pooling_stops_at_the_window(pooling: str, kernel: int, tail: int) -> None:
    view = make_view(Shape(pages=(6, 3), tail=tail), 5)
    rows = SnapKV(5, kernel, pooling).score(view)
    for row, head in zip(own(rows, Shape(pages=(6, 3))), oracles.heads_of(view), strict=True):
        expected = oracles.pooled(head, oracles.mass(head), kernel, pooling)
        assert torch.allclose(row.double(), torch.tensor(expected).double(), atol=1e-6)


@given(kernel=st.sampled_from([3, 5, 7]), size=st.integers(1, 12), seed=st.integers(0, 99))
def test_max_pooling_never_lowers_a_score(kernel: int, size: int, seed: int) -> None:
    scores = torch.rand(2, size, generator=torch.Generator().manual_seed(seed))
    assert bool((max_or_mean_pool(scores, kernel, "max") >= scores).all())


@given(shape=shapes)
def test_tova_scores_all_heads_alike(shape: Shape) -> None:
    scores = TOVA().score(make_view(Shape((4, 4), shape.tail, group=shape.group), 1))
    assert torch.equal(scores[0], scores[1])


def test_tova_is_the_mean_of_all_query_heads() -> None:
    view = make_view(Shape(pages=(4, 4), tail=2, group=4), 1)
    rows = [oracles.mass(head) for head in oracles.heads_of(view)]
    expected = [(a + b) / 2 for a, b in zip(*rows, strict=True)]
    assert torch.allclose(TOVA().score(view)[0], torch.tensor(expected), atol=1e-6)


ANCHORS = ("mean_normalized", "mean_raw")


@pytest.mark.parametrize("anchor", ANCHORS)
def test_keydiff_is_that_of_the_loop(anchor: str) -> None:
    shape = Shape(pages=(5, 2))
    view = make_view(shape, 0)
    rows = own(keydiff_scores(view.kv, anchor), shape)
    for row, head in zip(rows, oracles.heads_of(view), strict=True):
        expected = torch.tensor(oracles.keydiff(head, anchor))
        assert torch.allclose(row.double(), expected.double(), atol=1e-5)


@pytest.mark.parametrize("keys_as", ["unrotated", "rotated"])
def test_leverage_of_sixteen_bit_keys_is_that_of_the_same_keys_in_fp32(keys_as: str) -> None:
    """Rounding of a product's factors moves it less than rounding moved the cached keys."""
    view = make_view(Shape(pages=(40, 31)), 0)
    positions = torch.arange(view.num_entries).expand(view.num_heads, -1)
    rounded = view.kv.keys().bfloat16()
    wide, narrow = (
        replace(
            with_state(view, positions=positions),
            kv=GatheredKV(view.lengths, (keys, keys), (keys[:, :0], keys[:, :0])),
        )
        for keys in (rounded.float(), rounded)
    )
    expected, scores = leverage(wide, keys_as), leverage(narrow, keys_as)
    assert torch.allclose(scores, expected, rtol=0.02)
    assert 0 < expected[0].min() < 0.5 * expected[0].max()


def test_keydiff_ignores_key_lengths() -> None:
    view = make_view(Shape(pages=(6, 6)), 0)
    factors = torch.rand(2, 24, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    plain, scaled = (
        keydiff_scores(kv, "mean_normalized") for kv in (view.kv, of_keys(view.kv.keys() * factors))
    )
    assert torch.allclose(scaled, plain, atol=1e-5)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_keydiff_ignores_a_common_rotation(anchor: str) -> None:
    view = make_view(Shape(pages=(6, 6)), 0)
    random = torch.randn(HEAD_SIZE, HEAD_SIZE, generator=torch.Generator().manual_seed(2))
    rotation = torch.linalg.qr(random).Q
    plain = keydiff_scores(view.kv, anchor)
    rotated = keydiff_scores(of_keys(view.kv.keys() @ rotation), anchor)
    assert torch.allclose(rotated, plain, atol=1e-4)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_keydiff_of_zero_keys_is_zero(anchor: str) -> None:
    keys = torch.zeros(1, 8, HEAD_SIZE)
    assert not keydiff_scores(of_keys(keys), anchor).any()
    keys[0, 0] = 1.0
    assert float(keydiff_scores(of_keys(keys), anchor)[0, 5]) == 0


def test_tiles_do_not_change_geometry_or_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(Shape(pages=(5, 5)), 0)
    assert view.output_weight is not None
    assert view.output_root is not None

    def everything() -> list[torch.Tensor]:
        assert view.output_weight is not None
        assert view.output_root is not None
        return [
            keydiff_scores(view.kv, "mean_normalized"),
            keydiff_scores(view.kv, "mean_raw"),
            value_norms_l1(view.kv, view.output_weight, all_of(view)),
            value_norms_l2(view.kv, view.output_root.unflatten(0, (view.num_heads, -1))),
        ]

    untiled = everything()
    monkeypatch.setattr(tiles, "TILE_BYTES", 4 * 3 * 24)
    monkeypatch.setattr(value_norms, "MIN_PRODUCT_ROWS", 1)
    for a, b in zip(everything(), untiled, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_key_norms_ignore_rotation() -> None:
    view = make_view(Shape(pages=(6, 6)), 0)
    random = torch.randn(HEAD_SIZE, HEAD_SIZE, generator=torch.Generator().manual_seed(3))
    rotated = make_view(Shape(pages=(6, 6)), 0)
    rotated.kv.keys().copy_(view.kv.keys() @ torch.linalg.qr(random).Q)
    assert torch.allclose(KNorm().score(rotated), KNorm().score(view), atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_value_norms_are_those_of_the_loop(group: int) -> None:
    view = make_view(Shape(pages=(3, 3), group=group), 1)
    assert view.output_weight is not None
    assert view.output_root is not None
    l1 = value_norms_l1(view.kv, view.output_weight, all_of(view))
    l2 = value_norms_l2(view.kv, view.output_root.unflatten(0, (view.num_heads, -1)))
    for h, head in enumerate(oracles.heads_of(view)):
        for rows, how in ((l1, "l1"), (l2, "l2")):
            expected = torch.tensor(oracles.value_norms(head, how))
            assert torch.allclose(rows[h], expected, rtol=1e-4)


def test_sixteen_bit_value_norms_are_within_half_a_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 40, 64, generator=generator).bfloat16()
    weight = torch.randn(2, 64, 2, 4096, generator=generator).bfloat16()
    everything = torch.ones(2, 40, dtype=torch.bool)
    exact = value_norms_l1(of_keys(values.double()), weight.double(), everything)
    norms = value_norms_l1(of_keys(values), weight, everything)
    assert torch.allclose(norms, exact.float(), rtol=5e-3)


@pytest.mark.parametrize("rank", [0, 40, 64])
def test_norms_of_sixteen_bit_values_are_those_of_the_same_values_in_fp32(rank: int) -> None:
    """Even where the projection loses dimensions; two requests share the weights of two heads."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 50, 64, generator=generator).bfloat16()
    weight = torch.randn(2, 3, 64, rank, generator=generator)
    root = output_roots(weight)
    norms = value_norms_l2(of_keys(values), root.bfloat16())
    expected = (values.float()[:, None] @ weight.repeat(2, 1, 1, 1)).norm(dim=3).mean(dim=1)
    assert torch.allclose(norms, expected, rtol=0.01, atol=1e-6)
    assert bool(norms.min() > 0.1) == (rank > 0)


def test_unwanted_value_norms_are_left_out() -> None:
    view = make_view(Shape(pages=(3, 3)), 1)
    assert view.output_weight is not None
    wanted = torch.rand(2, 12, generator=torch.Generator().manual_seed(5)) < 0.5
    some = value_norms_l1(view.kv, view.output_weight, wanted)
    every_norm = value_norms_l1(view.kv, view.output_weight, all_of(view))
    assert torch.allclose(some, every_norm * wanted, atol=1e-5)


def all_of(view: LayerView) -> torch.Tensor:
    return torch.ones(view.valid.shape, dtype=torch.bool)


@pytest.mark.parametrize("head_bytes", [1, 4 * 200])
@pytest.mark.parametrize("variant", ["joint", "value", "key"])
def test_tiles_do_not_change_the_perturbation(
    monkeypatch: pytest.MonkeyPatch, variant: str, head_bytes: int
) -> None:
    """Tiles hold one query, or several."""
    view = make_view(Shape((9, 5), tail=3), 9)

    def scores() -> torch.Tensor:
        return OBCache(variant, window_size=9).score(view)

    untiled = scores()
    monkeypatch.setattr(tiles, "HEADS_BYTES", head_bytes)
    assert torch.allclose(scores(), untiled, atol=1e-5)


def test_pruning_values_of_zero_changes_no_output() -> None:
    view = make_view(Shape((4, 4), tail=2), 5)
    tail = (view.kv.tail_keys(), torch.zeros_like(view.kv.tail_values()))
    view = with_rows(view, values=torch.zeros_like(view.kv.values()), tail=tail)
    for variant in ("joint", "value", "key"):
        assert not OBCache(variant, window_size=5).score(view).any()


def test_without_value_norms_the_perturbation_ranks_as_the_squared_weights() -> None:
    """Values of one length: pruning a value changes the outputs by A^2, summed over queries."""
    view = make_view(Shape((4,), group=1), 1)
    values = view.kv.values() / view.kv.values().norm(dim=2, keepdim=True)
    scores = OBCache("value", window_size=1).score(with_rows(view, values=values))
    mass = SnapKV(1, 1).score(view)
    assert torch.allclose(scores, mass.square(), atol=1e-6)


@given(
    shape=shapes,
    window=st.integers(0, 12),
    variant=st.sampled_from(["code", "paper"]),
    kernel=st.sampled_from([1, 3, 7]),
    mix=st.sampled_from([0.0, 0.1, 1.0]),
    threshold=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_importance_less_redundancy_is_that_of_the_loop(
    shape: Shape, window: int, variant: str, kernel: int, mix: float, threshold: float
) -> None:
    policy = RKV(max(1, window), kernel, mix, threshold, variant)
    view = make_view(shape, window)
    params = {name: getattr(policy, name) for name in policy.__dataclass_fields__}
    scores = own(policy.score(view), shape)
    for row, head in zip(scores, oracles.heads_of(view), strict=True):
        left = max(0, head.size - max(0, len(head.queries) - head.num_tail))
        expected = torch.tensor(oracles.rkv(head, params)[:left])
        assert torch.allclose(row[:left], expected, atol=1e-6)


@pytest.mark.parametrize("variant", ["code", "paper"])
def test_pairs_of_keys_are_compared_in_tiles(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    view = make_view(Shape(pages=(9, 4), tail=3, group=1), 5)
    untiled = RKV(5, variant=variant).score(view)
    sizes: list[int] = []
    where = torch.where

    def watched(condition: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.append(condition.numel())
        return where(condition, *others)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(tiles, "TILE_BYTES", 4 * 2 * 39 * 5)
    monkeypatch.setattr(torch, "where", watched)
    tiled = RKV(5, variant=variant).score(view)
    assert torch.allclose(tiled[0], untiled[0], atol=1e-6)
    assert torch.allclose(tiled[1, :16], untiled[1, :16], atol=1e-6)
    assert max(sizes) <= 2 * 39 * 5


def test_of_equal_keys_the_latest_is_the_least_redundant() -> None:
    """The authors' variant; the paper's formula takes the same link from each of them."""
    view = make_view(Shape(pages=(6,), tail=0, group=1, seed=2), 0)
    keys = view.kv.keys().clone()
    keys[0, [9, 14]] = keys[0, 5].clone()
    scores = RKV(mix_lambda=0.0, threshold=0.99).score(with_rows(view, keys=keys))[0]
    assert scores[14] > scores[9] > scores[5]
    paper = RKV(mix_lambda=0.0, threshold=0.99, variant="paper").score(with_rows(view, keys=keys))
    assert torch.allclose(paper[0, 5], paper[0, [9, 14]])
