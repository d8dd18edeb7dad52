"""Merging of evicted entries, against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.policies import oracles
from tests.policies.cases import Shape, make_view, with_rows, with_state
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.merging.cam import CaM
from vllm_kvcompress.policies.merging.d2o import D2O

SHAPES = [Shape((9, 9)), Shape((3, 11), tail=2, group=1), Shape((4, 1, 6), tail=3)]


def some_kept(view: LayerView, seed: int, share: float = 0.4) -> torch.Tensor:
    """Any valid entries, at least one per head."""
    chosen = torch.rand(view.valid.shape, generator=torch.Generator().manual_seed(seed)) < share
    chosen[:, 0] = True
    return chosen & (torch.arange(view.num_entries) < view.lengths[:, None])


def observed(shape: Shape, num_queries: int) -> LayerView:
    """A view whose accumulated attention is computed by the loop."""
    view = make_view(shape, num_queries)
    accumulated = torch.zeros(view.valid.shape)
    for h, head in enumerate(oracles.heads_of(view)):
        accumulated[h, : head.size] = num_queries * torch.tensor(oracles.mass(head))
    return with_state(view, accumulated=accumulated)


def close(actual: torch.Tensor, expected: list[float]) -> bool:
    return bool(torch.allclose(actual.double(), torch.tensor(expected).double(), atol=1e-5))


def cam_targets(kept: list[bool], i: int, most: int) -> list[int]:
    return [j for j in range(i + 1, len(kept)) if kept[j]][:most]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_targets", "most"), [(1, 9.0), (4, 1.0), (100, 0.2)])
def test_cam_spreads_expected_values(shape: Shape, num_targets: int, most: float) -> None:
    view = observed(shape, 7)
    kept = some_kept(view, seed=num_targets)
    merger = CaM(num_targets, merge_window=7, max_received=most, draw="expected")
    merged = merger.merge(view, torch.zeros(()), kept)
    assert merged.keys is None
    assert merged.state is None
    assert merged.values is not None
    for h, head in enumerate(oracles.heads_of(view)):
        flags, masses = kept[h, : head.size].tolist(), oracles.mass(head)
        received = [[0.0] * len(head.values[0]) for _ in head.values]
        weight = [0.0] * head.size
        for i in range(head.size):
            targets = [] if flags[i] else cam_targets(flags, i, num_targets)
            if not targets:
                continue
            mean = sum(masses[t] for t in targets) / len(targets)
            share = min(1.0, masses[i] / mean) if mean else float(masses[i] > 0)
            for t in targets:
                weight[t] += share / len(targets)
                for c, x in enumerate(head.values[i]):
                    received[t][c] += share * x / len(targets)
        for j in range(head.size):
            if flags[j]:
                part = min(1.0, most / weight[j]) if weight[j] else 1.0
                wanted = [v + part * x for v, x in zip(head.values[j], received[j], strict=True)]
                assert close(merged.values[h, j], wanted)


def test_cam_preserves_the_contribution_of_an_evicted_entry() -> None:
    """For p < 1 the targets' weights times what they received is the evicted weight times value."""
    view = observed(Shape((4,), seed=3), 7)
    head = oracles.heads_of(view)[0]
    masses = oracles.mass(head)
    i = min(range(1, 8), key=lambda j: masses[j])
    kept = torch.ones(1, 16, dtype=torch.bool)
    kept[0, i] = False
    unbounded = CaM(4, merge_window=7, draw="expected", max_received=1.0)
    merged = unbounded.merge(view, torch.zeros(()), kept)
    assert merged.values is not None
    received = (merged.values - view.kv.values())[0].tolist()
    targets = cam_targets(kept[0].tolist(), i, 4)
    assert masses[i] < sum(masses[t] for t in targets) / 4
    for c in range(len(received[0])):
        given = sum(masses[t] * received[t][c] for t in targets)
        assert given == pytest.approx(masses[i] * head.values[i][c], abs=1e-6)


def test_cam_draws_with_the_right_chance_and_always_alike() -> None:
    """Over many layers the mean of random draws is the expected one."""
    view = observed(Shape((9, 9)), 7)
    kept = some_kept(view, seed=5)
    expected = CaM(4, 7, 99, "expected").merge(view, torch.zeros(()), kept).values
    random = CaM(4, 7, 99, "random")
    draws = [
        random.merge(replace(view, layers=range(layer, layer + 1)), torch.zeros(()), kept).values
        for layer in range(400)
    ]
    assert expected is not None
    again = random.merge(view, torch.zeros(()), kept).values
    assert torch.equal(draws[view.layer], again)  # type: ignore[arg-type]
    assert not torch.equal(draws[0], draws[1])  # type: ignore[arg-type]
    mean = torch.stack(draws).mean(dim=0)  # type: ignore[arg-type]
    assert (mean - expected)[kept].abs().max() < 0.12
    assert (expected - view.kv.values())[kept].abs().max() > 0.3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("theta", [None, 0.2])
def test_d2o_merges_into_the_most_similar_key(shape: Shape, theta: float | None) -> None:
    view = replace(make_view(shape, 1), layers=range(2, 3))
    if theta is not None:
        view = replace(view, state=torch.full((view.num_heads, 1), theta))
    kept = some_kept(view, seed=1)
    merged = D2O().merge(view, torch.zeros(()), kept)
    assert merged.keys is not None
    assert merged.values is not None
    assert merged.state is not None
    for h, head in enumerate(oracles.heads_of(view)):
        flags = kept[h, : head.size].tolist()
        best: dict[int, tuple[float, int]] = {}
        for i in (i for i in range(head.size) if not flags[i]):
            cosines = {
                j: oracles.dot(head.keys[i], head.keys[j])
                / (oracles.norm(head.keys[i]) * oracles.norm(head.keys[j]))
                for j in range(head.size)
                if flags[j]
            }
            target = max(cosines, key=lambda j: cosines[j])
            best[i] = cosines[target], target
        mean = sum(cosine for cosine, _ in best.values()) / max(1, len(best))
        limit = mean if theta is None else (theta + mean) / 2
        assert float(merged.state[h, 0]) == pytest.approx(limit, abs=1e-5)
        for j in (j for j in range(head.size) if flags[j]):
            came = [(c, i) for i, (c, t) in best.items() if t == j and c >= limit and c > 0]
            total = 1 + sum(c for c, _ in came)
            for actual, entries in ((merged.keys, head.keys), (merged.values, head.values)):
                wanted = [
                    (entries[j][d] + sum(c * entries[i][d] for c, i in came)) / total
                    for d in range(len(entries[j]))
                ]
                assert close(actual[h, j], wanted)


def test_d2o_leaves_the_first_layers_alone() -> None:
    view = replace(make_view(Shape((9, 9)), 1), layers=range(1, 2))
    merged = D2O(skip_layers=2).merge(view, torch.zeros(()), some_kept(view, seed=1))
    assert merged.keys is None
    assert merged.values is None


def test_d2o_merges_equal_keys_and_values_without_a_trace() -> None:
    view = replace(make_view(Shape((2,)), 1), layers=range(5, 6))
    keys, values = view.kv.keys().clone(), view.kv.values().clone()
    keys[0, 3], values[0, 3] = keys[0, 6], values[0, 6]
    kept = torch.ones(1, 8, dtype=torch.bool)
    kept[0, 3] = False
    view = with_rows(view, keys, values)
    merged = D2O().merge(view, torch.zeros(()), kept)
    assert merged.keys is not None
    assert math.isclose(float(merged.state[0, 0]), 1.0, abs_tol=1e-6)  # type: ignore[index]
    # theta is the one cosine, about 1 up to rounding, and reached by itself
    assert torch.allclose(merged.keys[0, 6], keys[0, 6], atol=1e-6)
