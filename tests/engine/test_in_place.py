"""Events in place on the real engine: the outputs of events that write to fresh blocks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.tiny_models import prompt

KEPT, EVERY, BLOCK = 128, 64, 32
SETTINGS = {"budget": KEPT, "trigger": f"prompt,decode:{EVERY}"}
CHECKED = {"KVCOMPRESS_CHECK": "1"}  # blocks are checked for owners, those that were freed poisoned
SCHEDULED = [("keydiff", False), ("keydiff", True), ("h2o", True), ("adakv", False)]
REQUESTS = [request(f"r{i}", prompt(300 + 41 * i, seed=i), 300, at_step=9 * i) for i in range(3)]


def in_place(report: dict[str, Any]) -> list[bool]:
    """Returns of each event whether it wrote to no fresh block."""
    return [event["blocks_written"] == 0 for event in report["events"]]


@pytest.mark.parametrize(("policy", "asynchronous"), SCHEDULED)
def test_outputs_are_those_of_fresh_blocks(
    llama: str, run_engine: Run, policy: str, asynchronous: bool
) -> None:
    """Token for token, and no event after the first takes a block."""
    settings, reports = {**SETTINGS, "policy": policy}, []
    for probes in ([], ["tests.engine.damage:write_to_fresh_blocks"]):
        report = run_engine(
            llama,
            [REQUESTS],
            settings=settings,
            environment=CHECKED,
            probes=probes,
            asynchronous=asynchronous,
        )
        assert report["free_at_end"] == report["num_blocks"] - 1
        reports.append(report)
    ours, fresh = reports
    assert sum(in_place(ours)) == len(ours["events"]) - len(REQUESTS) == 12
    assert not any(in_place(fresh))
    for name, output in fresh["outputs"].items():
        assert ours["outputs"][name]["tokens"] == output["tokens"], name
    # Kept blocks, those since, the partial one, and with asynchronous scheduling one more.
    most = (KEPT + EVERY) // BLOCK + 1 + asynchronous
    held = [max(held["r0"] for held in r["held"][60:] if "r0" in held) for r in reports]
    assert held[0] <= most < held[1]


def test_preempted_and_aborted_requests_leave_others_as_they_are(
    llama: str, run_engine: Run
) -> None:
    """In a pool for two thirds of them, aborted around their first event in place."""
    stay = [request(f"r{i}", prompt(200 + 5 * i, seed=i), 420) for i in range(6)]
    aborted = [
        request(f"gone{step}", prompt(150, seed=step), 300, abort_at_step=step)
        for step in range(191, 196)
    ]
    settings = {**SETTINGS, "policy": "keydiff", "trigger": "prompt,decode:192"}
    roomy = run_engine(llama, [stay], settings=settings)
    for asynchronous in (False, True):
        tight = run_engine(
            llama,
            [[*aborted, *stay]],
            settings=settings,
            environment=CHECKED,
            asynchronous=asynchronous,
            num_gpu_blocks_override=41,
            max_model_len=672,
        )
        assert tight["preemptions"] > 0
        assert any(in_place(tight))
        for name, output in roomy["outputs"].items():
            assert tight["outputs"][name]["tokens"] == output["tokens"], name
        assert tight["free_at_end"] == tight["num_blocks"] - 1


def test_prefixes_and_kept_states_are_never_written_to(llama: str, run_engine: Run) -> None:
    """Branches of a conversation begin with the same state, and each is compressed on its own."""
    settings = {
        "policy": "keydiff",
        "budget": 96,
        "trigger": "chunk:128",
        "min_tokens": 0,
        "reuse_conversations": "reuse",
    }
    first = request("first", prompt(256, seed=1), 100)
    branches = [
        request(name, prompt(28 + 128 * long, seed=5), 300, follows="first")
        for long, name in enumerate(("one", "other"))
    ]
    again = [{**one, "id": f"{one['id']} again", "at_step": 150} for one in branches]
    phases = [[first], [*branches, *again], [alone(one) for one in branches]]
    report = run_engine(llama, phases, settings=settings, environment=CHECKED)
    assert report["conversations_continued"] >= 4
    assert sum(in_place(report)) > 8
    check_as_alone(report["outputs"], [one["id"] for one in branches])
    for one in branches:
        tokens = report["outputs"][one["id"]]["tokens"]
        assert report["outputs"][f"{one['id']} again"]["tokens"] == tokens
