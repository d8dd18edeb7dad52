"""Events, first and repeated ones, never synchronise with the device that holds the pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.accelerator import ACCELERATOR, Operators, Synchronised, launched, watched
from tests.event_cases import BLOCK_SIZE, GROUP, SCALE, Request, left_by, make_pool, once
from tests.policies.cases import NUM_LAYERS, Shape, make_pipeline
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import Pipeline, describe, resolve
from vllm_kvcompress.policies.registry import modifiers, policies

SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
WINDOWED = {"window_size", "near_size", "merge_window"}
# Events within a block, at the end of one, and a single one.
COURSES = [("fraction", (70, 103)), ("tokens", (64, 96)), ("fraction", (71,))]


def every_policy() -> list[str]:
    """Returns every policy with every set of modifiers that is not refused."""
    names = []
    for base in policies():
        for number in range(len(modifiers()) + 1):
            for on_top in itertools.combinations(modifiers(), number):
                policy = "+".join((base, *on_top))
                try:
                    infos = describe(policy)
                except ConfigError:
                    continue
                if sorted(info.name for info in infos) == sorted(policy.split("+")):
                    names.append(policy)
    return names


def every_choice() -> list[tuple[str, dict[str, object]]]:
    """Returns every choice of every parameter, with a policy that takes it."""
    choices: dict[tuple[str, str, str], tuple[str, dict[str, object]]] = {}
    for policy in every_policy():
        for info in describe(policy):
            for parameter in info.parameters():
                for choice in parameter.choices:
                    key, params = (info.name, parameter.name, choice), {parameter.name: choice}
                    if choice != parameter.default and key not in choices and takes(policy, params):
                        choices[key] = (policy, dict[str, object](params))
    return list(choices.values())


def takes(policy: str, params: dict[str, str]) -> bool:
    """Returns whether a policy accepts these parameters, parts with profiles aside."""
    base, *on_top = policy.split("+")
    if policies()[base].profile:
        return True
    try:
        resolve("+".join((base, *(n for n in on_top if not modifiers()[n].profile))), params)
    except ConfigError:
        return False
    return True


def every_pair() -> list[str]:
    """Returns every policy, with modifiers so that every two parts that go together meet once."""
    names, met = [], set[frozenset[str]]()
    for name in every_policy():
        pairs = set(map(frozenset, itertools.combinations(name.split("+"), 2)))
        if not pairs <= met or "+" not in name:
            names.append(name)
            met |= pairs
    return names


CASES = [*((policy, {}) for policy in every_pair()), *every_choice()]


@pytest.fixture
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Pipeline:
    return small_pipeline(*request.param, tmp_path)


def small_pipeline(policy: str, params: dict[str, object], tmp_path: Path) -> Pipeline:
    """Makes a policy whose windows fit small requests."""
    names = {p.name for info in describe(policy) for p in info.parameters()}
    given: dict[str, object] = {name: 9 for name in names & WINDOWED}
    if "any_scores" in names:
        given["any_scores"] = "on"  # keydiff goes with nothing else
    return make_pipeline(policy, SHAPE, tmp_path, **(given | params))


def test_cases_cover_every_name_of_the_registry() -> None:
    parts = {part for policy, _ in CASES for part in policy.split("+")}
    assert parts == {*policies(), *modifiers()}


@pytest.mark.parametrize("pipeline", CASES, indirect=True, ids=str)
def test_events_never_synchronise_with_the_device(
    pipeline: Pipeline, request: pytest.FixtureRequest
) -> None:
    """Modifiers and choices change what an event computes, not where it ends: one course each."""
    policy, choice = request.node.callspec.params["pipeline"]
    plain = policy in policies() and not choice
    for budget, positions in COURSES if plain else COURSES[:1]:
        chosen = pipeline if len(positions) > 1 else once(pipeline)
        with watched():
            pool = make_pool(InterleavedPagePool, ACCELERATOR)
            events = Request(chosen, pool, budget, positions).run()
        assert [len(event.page_counts) for event in events] == [3] * len(positions)
        assert all(event.fresh_pages.device == ACCELERATOR for event in events)
        for event in events:
            assert event.max_kept == min(max(event.layer_pages), event.num_body) > 0


@pytest.mark.parametrize(
    ("policy", "most"),
    [("keydiff", 90), ("snapkv", 75), ("adakv", 110), ("snapkv+criticalkv", 110)],
)
def test_events_queue_few_operators(policy: str, most: int, tmp_path: Path) -> None:
    """Each operator takes the host a while; all layers run at once.

    Launches of Triton, a few to an event, are not counted.
    """
    pipeline = small_pipeline(policy, {}, tmp_path)
    request = Request(pipeline, make_pool(InterleavedPagePool, ACCELERATOR))
    plan = request.plan(request.positions[0])
    request.observe(plan)
    event = request.runner.begin(plan, request.block_row)
    (batch,) = request.runner.batches([event])
    with launched(), Operators() as operators:
        for layer in range(NUM_LAYERS):
            request.runner.run_layer(batch, layer, SCALE)
    assert most // 2 < operators.count <= most


def test_reading_kept_counts_on_the_host_is_detected(tmp_path: Path) -> None:
    pipeline = make_pipeline("adakv", SHAPE, tmp_path)
    with watched():
        request = Request(pipeline, make_pool(InterleavedPagePool, ACCELERATOR))
        request.run()
        counts = request.runner.tables.counts[0, request.runner.tables.slots["r"]]
        readers: list[Callable[[], object]] = [
            lambda: int(counts.max()),
            lambda: counts.tolist(),
            lambda: counts[torch.tensor([0])],
        ]
        for read in readers:
            with pytest.raises((RuntimeError, NotImplementedError, Synchronised)):
                read()


def test_host_bounds_of_kept_pages_hold(tmp_path: Path) -> None:
    """The host's bounds, kept without synchronisation, are never too small."""
    pipeline = make_pipeline("adakv", SHAPE, tmp_path)
    seen = Request(pipeline, make_pool(PackedPagePool)).run()
    with watched():
        bounds = Request(pipeline, make_pool(InterleavedPagePool, ACCELERATOR)).run()
    for event, bound in zip(seen, bounds, strict=True):
        assert event.max_kept == max(int(counts.max()) for counts in event.page_counts)
        assert event.max_kept <= bound.max_kept <= sum(map(int, event.page_counts[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_on_a_gpu_leave_what_they_leave_on_a_cpu(tmp_path: Path) -> None:
    """Once kernels are compiled, no part of an event synchronises."""
    for policy, params in CASES:
        left = []
        for device, mode in (("cpu", "default"), ("cuda", "default"), ("cuda", "error")):
            pool = make_pool(InterleavedPagePool, torch.device(device))
            request = Request(small_pipeline(policy, params, tmp_path), pool)
            torch.cuda.set_sync_debug_mode(mode)
            try:
                request.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            left.append(left_by(request))
        for on_gpu in left[1:]:
            check_left(on_gpu, left[0], policy)


def check_left(
    actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], what: str
) -> None:
    """Asserts that events on a GPU left what events on a CPU did, rounding aside."""
    for layer, other in zip(expected, actual, strict=True):
        assert torch.equal(other["counts"].cpu(), layer["counts"]), what
        for name in ("keys", "values", "carried"):
            close = torch.isclose(other[name].cpu(), layer[name], 1e-4, 1e-4, equal_nan=True)
            assert close.all(), (what, name)
