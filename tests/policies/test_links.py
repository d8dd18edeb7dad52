"""Merged neighbours: weights against plain loops, and invariants of groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offline.gathered_kv import GatheredKV
from tests.policies import oracles
from tests.policies.cases import Shape, make_pipeline, make_view, with_rows, with_state
from tests.policies.oracles.heads import Vector
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.kernels.attention import attention_with_lse
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.merging.neighbours import neighbour_cosines
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.policies.merging.asymkv import AsymKV
from vllm_kvcompress.policies.merging.groups import GroupMerging, Groups, tokens_of
from vllm_kvcompress.policies.merging.kvmerger import KVMerger
from vllm_kvcompress.policies.merging.kvslimmer import KVSlimmer

POLICIES = ["kvmerger", "asymkv", "kvslimmer"]
SHAPE = Shape((9, 6), tail=3)


def weigh(
    policy: GroupMerging, view: LayerView, mass: torch.Tensor, groups: list[list[int]]
) -> list[list[float]]:
    """Normalised weights of the groups of the only head, whose entries join one by one."""
    joined = torch.zeros(view.valid.shape, dtype=torch.int64)
    for group in groups:
        joined[0, group[1:]] = torch.arange(1, len(group))
    weights, _ = policy.weigh(view, mass, Groups.of(view, joined), tokens_of(view))
    actual = weights[0].tolist()
    return [[actual[j] / sum(actual[i] for i in group) for j in group] for group in groups]


def random_case(seed: int, scale: float = 0.1) -> tuple[LayerView, torch.Tensor]:
    view = make_view(Shape((3,), seed=seed), 1)
    return view, scale * torch.rand(1, 12, generator=torch.Generator().manual_seed(seed))


GROUPS = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10], [11]]


@pytest.mark.parametrize("sigma", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_kvmerger_weights_fall_with_the_distance_from_the_pivot(seed: int, sigma: float) -> None:
    view, mass = random_case(seed)
    actual = weigh(KVMerger(sigma=sigma), view, mass, GROUPS)
    keys = view.kv.keys()[0].double().tolist()
    for group, weights in zip(GROUPS, actual, strict=True):
        pivot = max(group, key=lambda j: float(mass[0, j]))
        distances = [math.dist(keys[pivot], keys[j]) for j in group]
        mean = sum(distances) / len(group)
        near = [math.exp(-((d / mean) ** 2)) if mean else 1.0 for d in distances]
        if sigma:
            near = [math.exp(-(d**2) / (2 * sigma**2)) for d in distances]
        assert weights == pytest.approx([g / sum(near) for g in near], abs=1e-5)


def test_random_pivots_are_of_the_group_and_the_same_every_time() -> None:
    """The pivot has the group's highest weight; over layers every member is one once."""
    view, mass = random_case(1)
    policy, pivots = KVMerger(pivot="random"), set()
    for layer in range(40):
        alike = [
            weigh(policy, replace(view, layers=range(layer, layer + 1)), mass, GROUPS)
            for _ in range(2)
        ]
        assert alike[0] == alike[1]
        weights = alike[0][GROUPS.index([6, 7, 8, 9])]
        pivots.add(weights.index(max(weights)))
    assert pivots == {0, 1, 2, 3}


@given(size=st.integers(1, 9), seed=st.integers(0, 99))
def test_groups_are_split_at_weak_links(size: int, seed: int) -> None:
    """No group exceeds max_set, whatever is linked, and no link that was left out is stronger than
    all others nearby."""
    view = make_view(Shape((9,), seed=seed), 1)
    policy = KVMerger(max_set=size, recent_fraction=0.0, heavy_fraction=0.0)
    link = policy.choose(view, torch.rand(1, 36), torch.tensor([1]))[0].tolist()
    cosines = neighbour_cosines(view.kv)[0].tolist()
    starts = [j for j in range(36) if not link[j]] + [36]
    assert max(b - a for a, b in itertools.pairwise(starts)) <= size
    half = (size + 1) // 2
    for left_out in starts[1:-1]:
        window = range(left_out // half * half, left_out // half * half + half)
        assert all(cosines[left_out] <= cosines[j] for j in window if 0 < j < 36)


def residuals(view: LayerView, mass: torch.Tensor) -> tuple[list[float], list[list[float]]]:
    values, total = view.kv.values()[0].double().tolist(), float(mass.double().sum())
    alpha = [float(m) / total for m in mass[0]]
    out = [sum(a * v[d] for a, v in zip(alpha, values, strict=True)) for d in range(len(values[0]))]
    return alpha, [[x - o for x, o in zip(v, out, strict=True)] for v in values]


def weights_of_pair(policy: AsymKV, alpha: Vector, rest: list[Vector], sizes: Vector) -> Vector:
    """Weights of two keys, by the formulas."""
    if not isinstance(policy, KVSlimmer):
        return [size**2 for size in sizes]
    norm = oracles.norm if policy.variant == "paper" else l1
    both = [a + b for a, b in zip(*rest, strict=True)]
    cross = alpha[0] * alpha[1] * (norm(both) if norm is oracles.norm else sum(map(l1, rest)))
    raw = [size - cross for size in sizes]
    if max(*alpha, sum(alpha)) >= 0.5 or sum(raw) <= 1e-6 * max(map(abs, sizes)):
        return [a * norm(r) for a, r in zip(alpha, rest, strict=True)]
    return [max(0.0, weight) for weight in raw]


def l1(row: Vector) -> float:
    return sum(map(abs, row))


def merge_in_rounds(
    policy: AsymKV,
    view: LayerView,
    mass: torch.Tensor,
    rounds: list[list[tuple[int, int]]],
    former: Vector | None = None,
) -> tuple[Vector, dict[int, float]]:
    """Weights of all keys in their groups, and what groups carry on, by loops over pairs."""
    alpha, rest = residuals(view, mass)
    norm = l1 if isinstance(policy, KVSlimmer) and policy.variant == "code" else oracles.norm

    def size_of(j: int) -> float:
        own = 1 - 2 * alpha[j] if isinstance(policy, KVSlimmer) else 1.0
        return alpha[j] * own * norm(rest[j])

    tokens = tokens_of(view)[0].tolist()
    members = {j: {j: 1.0} for j in range(len(alpha))}
    carried = {j: size_of(j) + (former[j] if former else 0) for j in members}
    for pairs in rounds:
        assert len({j for pair in pairs for j in pair}) == 2 * len(pairs), "pairs are disjoint"
        for pair in pairs:
            i, j = pair
            sizes = [carried[k] if former else size_of(k) for k in pair]
            raw = weights_of_pair(policy, [alpha[k] for k in pair], [rest[k] for k in pair], sizes)
            share = [
                w / sum(raw) if sum(raw) else tokens[k] / (tokens[i] + tokens[j])
                for w, k in zip(raw, pair, strict=True)
            ]
            carried[i] = sum(
                s**2 * size if isinstance(policy, KVSlimmer) else size
                for s, size in zip(share, sizes, strict=True)
            )
            number = tokens[i] + tokens[j]
            rest[i] = [
                (tokens[i] * a + tokens[j] * b) / number
                for a, b in zip(rest[i], rest[j], strict=True)
            ]
            alpha[i], tokens[i] = alpha[i] + alpha[j], number
            for k, weight in members.pop(j).items():
                members[i][k] = weight * share[1]
            for k in members[i]:
                members[i][k] *= share[0] if k < j else 1.0
            del carried[j]
    return [
        dict(x for group in members.values() for x in group.items())[k] for k in range(len(alpha))
    ], carried


PAIRS = "vllm_kvcompress.kernels.merging.pairs.reads_sizes"
ASYMKV = "vllm_kvcompress.policies.merging.asymkv.reads_sizes"
PAIRED = [AsymKV(), AsymKV(running="on"), KVSlimmer(), KVSlimmer(variant="code", running="on")]


@pytest.mark.parametrize("policy", PAIRED, ids=repr)
@given(
    seed=st.integers(0, 999), kept=st.integers(1, 12), sinks=st.integers(0, 3), exact=st.booleans()
)
def test_weights_are_those_of_pairs_merged_one_by_one(
    policy: AsymKV, seed: int, kept: int, sinks: int, exact: bool
) -> None:
    """Every merged token has Eq. 33's weight of every pair that it is in, round by round; on a
    GPU, where sizes are not read, too."""
    view, mass = random_case(seed)
    tokens = torch.randint(1, 4, mass.shape, generator=torch.Generator().manual_seed(seed))
    former = torch.rand(mass.shape, generator=torch.Generator().manual_seed(seed))
    view = with_state(view, bias=tokens.float().log(), running=former)
    policy = replace(policy, num_sinks=sinks, num_recent=0)
    with mock.patch(ASYMKV, return_value=exact), mock.patch(PAIRS, return_value=exact):
        joined = policy.choose(view, mass, torch.tensor([kept]))
        groups = Groups.of(view, joined)
        weights, carried = policy.weigh(view, mass, groups, tokens_of(view))
    ends = (min(sinks, kept - 1), 0)
    rounds = oracles.pair_rounds(mass[0].tolist(), tokens[0].tolist(), kept, ends)
    assert joined[0].tolist() == [
        next((r for r, pairs in enumerate(rounds, 1) if j in {b for _, b in pairs}), 0)
        for j in range(12)
    ]
    on = policy.running == "on"
    expected, sums = merge_in_rounds(policy, view, mass, rounds, former[0].tolist() if on else None)
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert (carried is not None) == on
    if carried is not None:
        assert len(sums) == kept
        for j, total in sums.items():
            assert float(carried[0, j]) == pytest.approx(total, abs=1e-4)


def test_kvslimmer_of_a_pair_is_the_paper_s_equation() -> None:
    """Eq. 33, with the norms of the Hessian's terms."""
    view, mass = random_case(1)
    alpha, rest = residuals(view, mass)
    (a1, a2), (r1, r2) = alpha[1:3], rest[1:3]
    c11 = oracles.norm([a1 * (1 - 2 * a1) * x for x in r1])
    c22 = oracles.norm([a2 * (1 - 2 * a2) * x for x in r2])
    c12 = oracles.norm([-a1 * a2 * (x + y) for x, y in zip(r1, r2, strict=True)])
    total = c11 + c22 - 2 * c12
    actual = weigh(KVSlimmer(), view, mass, [[1, 2]])[0]
    assert actual == pytest.approx([(c11 - c12) / total, (c22 - c12) / total], abs=1e-5)


def test_equal_mass_and_residuals_weigh_one_half() -> None:
    view, mass = random_case(2)
    values = view.kv.values().clone()
    values[0, 2] = values[0, 1]
    mass[0, 1:3] = 0.01
    actual = weigh(KVSlimmer(), with_rows(view, values=values), mass, [[1, 2]])[0]
    assert actual == pytest.approx([0.5, 0.5], abs=1e-5)


def test_pairs_of_little_mass_are_weighted_by_mass_and_residual() -> None:
    view, mass = random_case(3)
    mass[0, 1], mass[0, 2] = 1e-6, 3e-6
    alpha, rest = residuals(view, mass)
    actual = weigh(KVSlimmer(), view, mass, [[1, 2]])[0]
    raw = [alpha[j] * oracles.norm(rest[j]) for j in (1, 2)]
    assert actual == pytest.approx([w / sum(raw) for w in raw], abs=1e-4)


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize(
    "case", ["one holds all", "half", "no mass", "no residual", "huge", "tiny"]
)
def test_weights_are_finite_and_not_negative_for_any_input(case: str, variant: str) -> None:
    """Inputs: mass of one half and more, residuals of zero, and groups of every size."""
    view, mass = random_case(4)
    values = view.kv.values().clone()
    if case == "one holds all":
        mass.zero_()
        mass[0, 2] = 1.0
    elif case == "half":
        mass.zero_()
        mass[0, 1:3] = 0.5
    elif case == "no mass":
        mass.zero_()
    elif case == "no residual":
        values[:] = 1.0
    elif case == "huge":
        values *= 1e18
    else:
        mass *= 1e-30
    view = with_rows(view, values=values)
    everything = [[0], [1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11]]
    for group in weigh(KVSlimmer(variant=variant), view, mass, everything):
        assert all(0 <= weight <= 1 for weight in group)
        assert sum(group) == pytest.approx(1, abs=1e-5)


def kept_of(selection: Selection, view: LayerView, head: int) -> list[int]:
    counts = (selection.page_counts * view.block_size).tolist()
    start = sum(counts[:head])
    return selection.kept_indices[start : start + counts[head]].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("total", [3, 7, 12])
def test_tokens_add_up_to_those_that_were_there(policy: str, total: int, tmp_path: Path) -> None:
    """Holds when merged entries merge again."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    view = make_view(SHAPE, pipeline.needs.window_size)
    before = torch.randint(1, 6, view.valid.shape, generator=torch.Generator().manual_seed(1))
    view = with_state(view, bias=before.float().log())
    selection = compress_layer(pipeline, view, total)
    assert selection.merged.bias is not None
    for head, length in enumerate(view.lengths.tolist()):
        after = selection.merged.bias[head, kept_of(selection, view, head)].exp()
        assert float(after.sum()) == pytest.approx(float(before[head, :length].sum()), rel=1e-4)


@pytest.mark.parametrize("policy", ["asymkv", "kvslimmer"])
@pytest.mark.parametrize("num_recent", [-1, 0, 5])
def test_recent_entries_are_never_linked(policy: str, num_recent: int, tmp_path: Path) -> None:
    """Recent entries have no mass yet. They take at most half of what sinks leave of a budget."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path, num_recent=num_recent)
    view = make_view(SHAPE, pipeline.needs.window_size)
    wanted = pipeline.needs.window_size if num_recent < 0 else num_recent
    recent = max(0, wanted - view.num_tail)
    mass = torch.rand(2, view.num_entries) + 1.0
    for head, length in enumerate(view.lengths.tolist()):
        mass[head, length - wanted :] = 1e-6
    scorer = pipeline.scorer
    assert isinstance(scorer, AsymKV)
    for num_kept in (24, 16, 12, 4, 1):
        link = scorer.choose(view, mass, torch.tensor([num_kept, num_kept]))
        for head, length in enumerate(view.lengths.tolist()):
            assert int((link[head] > 0).sum()) == max(0, length - num_kept)
            left = num_kept - scorer.num_sinks
            room = max(0, min(recent, left - 1, left // 2))
            assert not link[head, length - room :].any()
            if not recent and num_kept < length:
                assert link[head, length - wanted : length].any() or not wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_keys_merge_without_a_trace(policy: str, tmp_path: Path) -> None:
    """Attention over what is left equals attention to everything, twice in a row."""
    shape = Shape((12,), group=1)
    room = {"max_set": 64} if policy == "kvmerger" else {}
    pipeline = make_pipeline(policy, shape, tmp_path, merge_space="rotated", **room)
    view = make_view(shape, pipeline.needs.window_size)
    keys = view.kv.keys().clone()
    keys[:] = keys[0, 0].clone()
    view = with_rows(view, keys=keys)
    query = torch.randn(1, 1, 1, keys.shape[2], generator=torch.Generator().manual_seed(3))

    def attend(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        length = torch.tensor([keys.shape[1]])
        return attention_with_lse(query, keys, values, length, view.scale, bias)[0]

    expected = attend(view.kv.keys(), view.kv.values(), None)
    for total in (7, 3):
        selection = compress_layer(pipeline, view, total)
        kept, merged = kept_of(selection, view, 0), selection.merged
        assert merged.keys is not None
        assert merged.values is not None
        assert merged.bias is not None
        positions = view.entries.positions[:, : len(kept)]  # type: ignore[index]
        view = with_state(view, bias=merged.bias[:, kept], positions=positions)
        view = replace(view, kv=GatheredKV.of(merged.keys[:, kept], merged.values[:, kept]))
        actual = attend(view.kv.keys(), view.kv.values(), view.entries.bias)
        assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "paper"])
def test_other_value_modes_carry_no_bias(mode: str, tmp_path: Path) -> None:
    pipeline = make_pipeline("kvmerger", SHAPE, tmp_path, value_mode=mode)
    assert not pipeline.weighs_entries
    view = make_view(SHAPE, pipeline.needs.window_size)
    merged = compress_layer(pipeline, view, 7).merged
    lossless = compress_layer(make_pipeline("kvmerger", SHAPE, tmp_path), view, 7).merged
    assert merged.bias is None
    assert merged.values is not None
    assert lossless.values is not None
    assert lossless.bias is not None
    factor = lossless.bias.exp() if mode == "paper" else torch.ones_like(lossless.bias)
    valid = torch.arange(view.num_entries) < view.lengths[:, None]
    expected = lossless.values * factor[..., None]
    assert torch.allclose(merged.values[valid], expected[valid], atol=1e-4)


def test_nothing_is_similar_enough_at_a_threshold_of_one(tmp_path: Path) -> None:
    """The entries of lowest score are evicted instead, and the others are unchanged."""
    pipeline = make_pipeline("kvmerger", SHAPE, tmp_path, budget_mode="threshold", threshold=1.0)
    view = make_view(SHAPE, pipeline.needs.window_size)
    selection = compress_layer(pipeline, view, 7)
    merged = selection.merged
    assert merged.keys is not None
    assert merged.bias is not None
    for head in range(2):
        kept = kept_of(selection, view, head)
        assert torch.equal(merged.keys[head, kept], view.kv.keys()[head, kept])
        assert not merged.bias[head, kept].any()


def test_neighbour_cosines_compare_each_key_with_the_one_before() -> None:
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 0.0], [1.0, 1.0]]])
    cosines = neighbour_cosines(GatheredKV.of(keys, keys))[0]
    assert cosines.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0, 0.0])


def test_groups_of_one_entry_keep_the_exact_key(tmp_path: Path) -> None:
    pipeline = make_pipeline("kvslimmer", SHAPE, tmp_path)
    view = make_view(SHAPE, pipeline.needs.window_size, torch.bfloat16)
    merged = compress_layer(pipeline, view, 14).merged
    assert merged.keys is not None
    assert merged.bias is not None
    alone = merged.bias[0] == 0
    alone &= torch.nn.functional.pad(merged.bias[0, 1:] == 0, (0, 1), value=True)
    assert alone.any()
    same = (merged.keys[0] == view.kv.keys()[0]).all(dim=1)
    assert same[:3].all(), "sinks"


@pytest.mark.parametrize("halves", [True, False])
def test_rotated_keys_are_those_of_the_loop(halves: bool) -> None:
    """Pairs of dims rotate by frequency times steps; the other dims are unchanged."""
    frequencies = [1.0, 0.3, 0.05]
    rotary = Rotary(torch.tensor(frequencies), halves)
    keys = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    steps = torch.tensor([[0, 1, -3, 700], [5, 0, 2, 9]])
    actual = rotary.rerotate(keys, steps)
    for head in range(2):
        for j in range(4):
            expected = keys[head, j].tolist()
            for pair, frequency in enumerate(frequencies):
                a, b = (pair, pair + 3) if halves else (2 * pair, 2 * pair + 1)
                angle = frequency * int(steps[head, j])
                x, y = float(keys[head, j, a]), float(keys[head, j, b])
                expected[a] = x * math.cos(angle) - y * math.sin(angle)
                expected[b] = y * math.cos(angle) + x * math.sin(angle)
            assert actual[head, j].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("halves", [True, False])
def test_averaged_rotation_equals_the_mean_of_rotations(halves: bool) -> None:
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.05]), halves)
    row = torch.randn(8, generator=torch.Generator().manual_seed(2))
    turned = [rotary.rerotate(row, torch.tensor(step)) for step in range(5)]
    assert (row @ rotary.averaged(5, 8)).tolist() == pytest.approx((sum(turned) / 5).tolist())


@pytest.mark.parametrize("policy", POLICIES)
def test_one_key_at_many_positions_is_that_key_at_one_of_them(policy: str, tmp_path: Path) -> None:
    """Unrotated, twice in a row: groups of a key that is the same but for its position."""
    shape = Shape((12,), group=1)
    room = {"max_set": 64} if policy == "kvmerger" else {}
    pipeline = make_pipeline(policy, shape, tmp_path, merge_space="unrotated", **room)
    view = make_view(shape, pipeline.needs.window_size)
    assert view.entries.positions is not None
    assert view.rotary is not None
    origin = view.kv.keys()[:, :1].expand(-1, 48, -1)
    view = with_rows(view, view.rotary.rerotate(origin, view.entries.positions))
    for total in (7, 3):
        selection = compress_layer(pipeline, view, total)
        kept, merged = kept_of(selection, view, 0), selection.merged
        assert merged.keys is not None
        assert merged.values is not None
        assert merged.bias is not None
        assert merged.positions is not None
        positions = merged.positions[:, kept]
        assert (positions[0].diff() > 0).all()
        if policy != "kvmerger":  # each group is where its last one was, and the next begins
            assert positions[0, -1] == 47
            first = torch.cat((torch.zeros(1), positions[0, :-1].float() + 1))
            assert torch.allclose(merged.bias[0, kept].exp(), positions[0] - first + 1, atol=1e-3)
        expected = view.rotary.rerotate(origin[:, : len(kept)], positions)
        assert torch.allclose(merged.keys[:, kept], expected, atol=1e-4)
        view = with_state(view, bias=merged.bias[:, kept], positions=positions)
        view = replace(view, kv=GatheredKV.of(merged.keys[:, kept], merged.values[:, kept]))


def test_a_pivot_s_position_is_that_of_the_highest_mass() -> None:
    view, mass = random_case(5)
    link = torch.zeros(1, 12, dtype=torch.bool)
    link[0, [1, 2, 5]] = True
    groups = Groups.of(view, link)
    for group in ([0, 1, 2], [3], [4, 5], [6]):
        heaviest = max(group, key=lambda j: float(mass[0, j]))
        assert groups.highest(mass)[0, group].tolist() == [heaviest] * len(group)
        assert groups.last(view.entries.positions)[0, group].tolist() == [group[-1]] * len(group)  # type: ignore[arg-type]
