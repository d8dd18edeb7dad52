"""Norms of values that events remember by page are those of what the pages hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

PROBE = "tests.engine.test_remembered_norms:compare_norms"
CRITICALKV = {"policy": "adakv+criticalkv", "budget": 0.5}


def compare_norms(report: dict[str, Any]) -> None:
    """Computes norms anew wherever an event takes remembered ones, and reports differences."""
    from vllm_kvcompress.cache.pages import PackedKV

    report["norms"] = {"remembered": 0, "computed": 0, "wrong": 0}
    projected_norms = PackedKV.projected_norms

    def compared(self: Any, compute: Any) -> Any:
        def counted(view: Any) -> Any:
            report["norms"]["computed"] += view.capacity
            return compute(view)

        counted_before = report["norms"]["computed"]
        norms = projected_norms(self, counted)
        computed = report["norms"]["computed"] - counted_before
        report["norms"]["remembered"] += self.capacity - computed
        wrong = (norms - compute(self)).abs() > 1e-5 * norms.abs()
        report["norms"]["wrong"] += int((wrong & self.valid).sum())
        return norms

    PackedKV.projected_norms = compared


def conversations(number: int, turns: int) -> list[list[dict[str, Any]]]:
    """Returns turns of conversations that go on beside each other, with different lengths."""
    phases = []
    for turn in range(turns):
        phase = []
        for index in range(number):
            tokens = prompt(300 + 40 * index if turn == 0 else 60, seed=100 * turn + index)
            former = {"follows": f"c{index}t{turn - 1}"} if turn else {}
            phase.append(request(f"c{index}t{turn}", tokens, 8, **former))
        phases.append(phase)
    return phases


@pytest.mark.parametrize(
    ("blocks", "settings"),
    [
        (400, {}),
        (70, {}),
        (400, {"trigger": "chunk:256"}),
        (70, {"reuse_conversations": "reuse"}),
    ],
    ids=["room for all", "blocks are given again", "chunks", "conversations go on"],
)
def test_norms_of_a_turn_are_those_of_its_pages(
    llama: str, run_engine: Run, blocks: int, settings: dict[str, Any]
) -> None:
    report = run_engine(
        llama,
        conversations(number=4, turns=4),
        settings={**CRITICALKV, **settings},
        num_gpu_blocks_override=blocks,
        max_model_len=1024,
        probes=[PROBE],
    )
    assert report["norms"]["wrong"] == 0
    assert report["norms"]["computed"] > 0
    if blocks == 400 and not settings:
        assert report["norms"]["remembered"] > report["norms"]["computed"]


def test_norms_are_computed_again_after_the_weights_changed(llama: str, run_engine: Run) -> None:
    reports = [
        run_engine(
            llama,
            conversations(number=2, turns=3),
            settings=CRITICALKV,
            probes=[PROBE],
            calls=calls,
        )
        for calls in ([], [(2, "refresh_weights", {})])
    ]
    once, again = (report["norms"] for report in reports)
    history = again["computed"] - once["computed"]
    assert history == once["remembered"] - again["remembered"] > 0
    assert again["wrong"] == 0
