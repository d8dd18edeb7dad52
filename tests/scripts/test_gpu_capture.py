"""gpu_check's part `capture`, with a recording instead of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_parts.capture import POLICIES, CapturePlan, Traffic, check_steps, measure_capture
from gpu_parts.report import as_markdown, capture_passed
from tests.gpu_path.graphs import Recording, launched
from vllm_kvcompress.attention import decode_steps

PLAN = CapturePlan(rows=(1, 4, 9), rounds=18, longest=120, num_layers=3, small=True, device="cpu")
KERNELS = ("decode_rows", "record_queries", "correct_with_moments")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Records a step, and returns a function that repeats its launches on the same memory."""
    for name in KERNELS:
        if hasattr(decode_steps, name):
            monkeypatch.setattr(decode_steps, name, launched(getattr(decode_steps, name)))

    def record(work: Callable[[], Any]) -> Callable[[], Any]:
        with torch.inference_mode(), Recording() as graph:
            work()
        assert graph.launches["decode_rows"] == PLAN.num_layers
        return graph.replay

    return record


@pytest.mark.parametrize("policy", POLICIES)
def test_replays_attend_and_remember_while_all_that_they_read_moves(
    policy: str, capture: Callable[[Any], Any]
) -> None:
    row = check_steps(CapturePlan(**{**vars(PLAN), "policy": policy}), capture)
    assert row["passed"], row
    assert row["compressed"] >= 30
    assert min(row["moved"][name] for name in ("block table", "page table", "ring buffers")) >= 5


def test_a_replay_whose_buffers_were_not_filled_is_noticed(
    capture: Callable[[Any], Any],
) -> None:
    row = check_steps(PLAN, capture, fills=False)
    assert not row["passed"]
    assert row["error"] > 0.1
    assert row["forgotten"] > 0


def test_memory_behind_stale_addresses_is_overwritten() -> None:
    """It holds block or page 0, whose numbers are NaN."""
    traffic = Traffic(PLAN)
    for _ in range(4):
        traffic.join()
    names = list(traffic.requests)
    traffic.requests[names[0]].num_tokens = 100
    traffic.requests[names[0]].blocks = traffic._take(7)
    traffic.compress(names[0])
    traffic.advance(names, 4)
    former = [traffic._former[name] for name in ("block table", "page table 0")]
    assert all(table.any() for table in former)
    traffic.advance(names[:3], 4)
    assert not any(table.any() for table in former)
    assert traffic.pool.pages[: traffic.pool.pages_per_block].isnan().all()


def test_both_modes_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """Without a GPU the capturing process ends with an error, which the report shows."""
    rows = measure_capture(PLAN, POLICIES[:1], tmp_path / "new", limit_seconds=240)
    graph, eager = rows
    assert (graph["mode"], eager["mode"], eager["passed"]) == ("graph", "eager", True)
    if not torch.cuda.is_available():
        assert graph["refused"].startswith("ended with 1: ")
    assert not capture_passed(rows)
    assert capture_passed([eager])
    text = as_markdown({**RESULTS, "capture": rows})
    assert "| eager | snapkv | 1, 4, 9 | 3 | 18 |" in text
    assert "Failed." in text
    assert f"graph, snapkv: {graph['refused']}" in text


RESULTS = {"device": "x", "versions": {}, "quick": False}
