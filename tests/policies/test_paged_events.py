"""Events over pages, by kernels that read these, leave what events over gathered tensors leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offline.gathered_kv import GatheredKV
from tests.accelerator import twin_of
from tests.event_cases import BLOCK_SIZE, GROUP, Request, left_by, make_pool
from tests.kernels.cases import make_entries
from tests.policies.cases import POLICIES, Shape, make_pipeline, make_view
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool
from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.kernels.common import tiles
from vllm_kvcompress.kernels.common.kv_view import NUM_TEMPORARIES, KVView, PagedKV
from vllm_kvcompress.policies import Pipeline

SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
# Events within a block, and at the end of one.
COURSES = [("fraction", (70, 103)), ("tokens", (64, 96))]
CASES: list[tuple[str, dict[str, object]]] = [
    *((policy, {}) for policy in POLICIES),
    ("keydiff", {"anchor": "mean_raw"}),
    ("snapkv+criticalkv", {"norm": "l1"}),
    ("kvmerger", {"merge_space": "unrotated"}),
    ("kvmerger", {"value_mode": "mean"}),
    ("kvmerger", {"value_mode": "paper"}),
    ("asymkv", {"merge_space": "rotated"}),
    ("kvslimmer", {"merge_space": "rotated"}),
]
# What these policies compute, kernels compute from pages.
NEVER_GATHER = [
    "streamingllm",
    "tova",
    "h2o",
    "snapkv",
    "adakv+criticalkv",
    "snapkv+criticalkv",
    "pyramidkv+adakv+criticalkv",
    "duoattention",
]


def run(pipeline: Pipeline, kind: type, budget: str, positions: tuple[int, ...]) -> Request:
    request = Request(pipeline, make_pool(kind), budget, positions)
    request.run()
    return request


@pytest.mark.parametrize(("policy", "params"), CASES, ids=str)
def test_paged_and_gathered_caches_keep_the_same(
    policy: str, params: dict[str, object], tmp_path: Path
) -> None:
    """The same entries on the same pages; sums in another order differ by rounding alone."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path, **params)
    for budget, positions in COURSES:
        gathered = run(pipeline, PackedPagePool, budget, positions)
        paged = run(pipeline, InterleavedPagePool, budget, positions)
        for expected, result in zip(left_by(gathered), left_by(paged), strict=True):
            assert torch.equal(result["counts"], expected["counts"])
            assert torch.equal(result["pages"], expected["pages"])
            for name in ("keys", "values", "carried"):
                torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-6)
            if pipeline.merger is None:
                assert torch.equal(result["keys"], expected["keys"])
                assert torch.equal(result["values"], expected["values"])


MERGING = [
    *((name, {}) for name in ("h2o+cam", "d2o", "asymkv", "kvslimmer", "momentkv")),
    ("kvmerger", {"value_mode": "paper"}),
]


@pytest.mark.parametrize("kind", [PackedPagePool, InterleavedPagePool])
@pytest.mark.parametrize(("policy", "params"), MERGING)
def test_several_heads_at_once_merge_as_one_by_one(
    policy: str,
    kind: type,
    params: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices other than CPUs take several heads at once."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path, **params)
    expected = left_by(run(pipeline, kind, *COURSES[0]))
    taken = []

    def all_of_them(view: KVView) -> list[slice]:
        taken.append(view.num_heads)
        return [slice(0, view.num_heads)]

    monkeypatch.setattr(KVView, "head_slices", all_of_them)
    for layer, same in zip(expected, left_by(run(pipeline, kind, *COURSES[0])), strict=True):
        for name in ("counts", "pages"):
            assert torch.equal(same[name], layer[name])
        for name in ("keys", "values", "carried"):
            torch.testing.assert_close(same[name], layer[name], rtol=1e-5, atol=1e-6)
    assert taken
    assert set(taken) == {2}


@pytest.mark.parametrize("policy", NEVER_GATHER)
def test_kernels_read_pages_without_gathering_them(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the twins that stand in for kernels gather."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    request = Request(pipeline, make_pool(InterleavedPagePool))
    launched, gather = [], PagedKV.gather

    def launch(module: str, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            launched.append(name)
            result = twin_of(module, name)(*args, **kwargs)
            launched.pop()
            return result

        return call

    def only_by_twins(view: PagedKV, which: int, tail: bool) -> torch.Tensor:
        assert launched
        return gather(view, which, tail)

    def refuse(*args: object) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr(dispatch, "takes_triton", lambda device: True)
    monkeypatch.setattr(dispatch, "triton_kernel", launch)
    monkeypatch.setattr(PagedKV, "gather", only_by_twins)
    for name in ("keys", "values", "take"):
        monkeypatch.setattr(InterleavedPagePool, name, refuse)
    assert len(request.run()) == 2


def test_entries_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    view, gather = PagedKV.of(make_entries([9, 6]), num_tail=1), PagedKV.gather
    asked = []

    def noting(view: PagedKV, which: int, tail: bool) -> torch.Tensor:
        asked.append((which, tail))
        return gather(view, which, tail)

    monkeypatch.setattr(PagedKV, "gather", noting)
    assert not asked
    assert view.keys() is view.keys()
    assert torch.equal(view.tail_values(), view.tail_values())
    assert asked == [(0, False), (1, True)]


def test_as_many_heads_at_once_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    view = make_view(Shape(pages=(8,) * 5), 0).kv
    assert isinstance(view, GatheredKV)
    on_device = replace(view, lengths=view.lengths.to("meta"))
    of_a_head = 4 * NUM_TEMPORARIES * view.capacity * view.head_size
    for tile, starts in ((5 * of_a_head, [0]), (3 * of_a_head - 1, [0, 2, 4]), (1, range(5))):
        for name, one in (("HEADS_BYTES", view), ("DEVICE_TILE_BYTES", on_device)):
            monkeypatch.setattr(tiles, name, tile)
            assert [part.start for part in one.head_slices()] == list(starts)


def test_every_thread_has_as_many_heads_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(Shape(pages=(8,) * 8), 0).kv
    of_a_head = 4 * NUM_TEMPORARIES * view.capacity * view.head_size
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for tile, starts in ((1, [0, 3, 6]), (of_a_head, [0, 3, 6]), (2 * of_a_head, [0, 6])):
        monkeypatch.setattr(tiles, "HEADS_BYTES", tile)
        assert [part.start for part in view.head_slices()] == starts
