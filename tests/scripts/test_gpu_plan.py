"""The plan that gpu_check prints, and the goals in its report."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from gpu_parts.goals import goals
from gpu_parts.plan import PLAN, as_text
from tests.scripts.test_gpu_check import DECODE, EVENT, LOAD, RUN, SCRIPT, results
from vllm_kvcompress.cli import main


def commands() -> list[list[str]]:
    """Returns the commands of the printed plan."""
    return [shlex.split(line) for line in as_text().splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_of_the_plan_parses(command: list[str]) -> None:
    if command[0] == "python":
        assert (SCRIPT.parents[1] / command[1]).samefile(SCRIPT)
        options = runpy.run_path(str(SCRIPT))["parse"](command[2:])
        (step,) = [step for step in PLAN if shlex.split(step.command) == command]
        assert options.limit < 60 * step.minutes  # for the start, and what it writes
        assert not options.rehearse
    else:
        assert command[0] == "vllm-kvcompress"
        parsed = main._parser(command[1]).parse_args(command[1:])
        assert callable(parsed.func)
        for name, value in parsed.engine:
            assert isinstance(value, dict), name


def test_the_plan_takes_half_an_hour_in_calls_of_ten_minutes() -> None:
    assert len(commands()) == len(PLAN)
    assert sum(step.minutes for step in PLAN) <= 30
    assert max(step.minutes for step in PLAN) <= 10
    assert all(step.needs and step.tells for step in PLAN)


def test_the_plan_is_in_order() -> None:
    text = as_text()
    order = (
        *("--jit-monitor-mode error", "--layers 2", "--part capture", "decode-only"),
        *("eval", "bench --scenario all"),
    )
    places = [text.index(word) for word in order]
    assert places == sorted(places)


def test_runs_of_the_plan_have_different_labels(tmp_path: Path) -> None:
    """Otherwise a later call would overwrite an earlier one's results."""
    script = runpy.run_path(str(SCRIPT))
    labels = []
    for command in commands():
        if "engine" in command and command[0] == "python":
            options = script["parse"](command[2:])
            options.out = tmp_path
            plan = script["engine_plan"](options)
            labels.append(plan.label)
            config = json.loads((Path(plan.model) / "config.json").read_text())
            assert config["num_hidden_layers"] == (2 if plan.checked else 32)
            if "decode-only" in command:
                assert (plan.batches, plan.steps) == ((1, 8, 64), 128)
                assert plan.names[:2] == ("compressed", "stock")
    assert labels == ["prompt,decode:64, checked", "prompt", "prompt, pool of 4"]


def reached(engine: dict[str, Any] | None = None, **more: Any) -> dict[str, tuple[str, bool]]:
    """Returns by a goal's first words what was measured, and whether it holds."""
    runs = {} if engine is None else {"engine": {"prompt": engine}}
    all_goals = goals(results(**runs, **more))
    return {" ".join(goal.text.split()[:3]): (goal.measured, goal.holds) for goal in all_goals}


def timed(seconds: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Returns rows of decode-only whose requests were all compressed before."""
    return [
        {"length": length, "batch": batch, "seconds": each, "events_before": batch, "others": 0}
        for (length, batch), each in seconds.items()
    ]


def run_with(**engines: dict[str, Any]) -> dict[str, Any]:
    return {**RUN, "engines": engines}


STOCK = {(512, 1): 1.0, (1024, 1): 1.0, (32768, 8): 2.0}


@pytest.mark.parametrize(
    ("long", "short", "holds"),
    [(0.9, 1.0, (True, True)), (1.12, 0.9, (False, True)), (0.9, 1.01, (True, False))],
)
def test_decode_steps_are_compared_with_stock(
    long: float, short: float, holds: tuple[bool, bool]
) -> None:
    """Steps of fewer than 1,024 tokens may take longer."""
    ours = timed({(512, 1): 1.5, (1024, 1): short, (32768, 8): long})
    by_goal = reached(
        run_with(compressed={"decode_only": ours}, stock={"decode_only": timed(STOCK)})
    )
    assert by_goal["steps of 8"] == (f"{long / 2:.2f}x", holds[0])
    worst = max(short, long / 2)
    assert by_goal["steps never take"][0].startswith(f"at most {worst:.2f}x")
    assert by_goal["steps never take"][1] == holds[1]


def test_steps_of_uncompressed_requests_reach_no_goal() -> None:
    ours = [{**row, "events_before": 0} for row in timed(STOCK)]
    engines = {"compressed": {"decode_only": ours}, "stock": {"decode_only": timed(STOCK)}}
    assert reached(run_with(**engines)) == {}
    assert reached({**run_with(**engines), "checked": True}) == {}


@pytest.mark.parametrize(("ratio", "holds"), [(1.5, True), (1.49, False)])
def test_requests_per_second_are_compared_where_the_pool_is_full(ratio: float, holds: bool) -> None:
    engines = {"compressed": {"load": {**LOAD, "requests_per_second": 2 * ratio}}}
    run = run_with(**engines, stock={"load": LOAD})
    assert reached(run) == {}
    assert reached({**run, "pool": 4})["at least 1.5x"] == (f"{ratio:.2f}x", holds)


@pytest.mark.parametrize(
    ("seconds", "throughput", "holds"), [(1.01, 2.0, True), (0.97, 2.0, False), (1.0, 2.05, False)]
)
def test_engine_without_compression_is_compared_with_stock(
    seconds: float, throughput: float, holds: bool
) -> None:
    off = {
        "decode_only": timed({(1024, 1): seconds}),
        "load": {**LOAD, "requests_per_second": throughput},
    }
    by_goal = reached(run_with(off=off, stock={"decode_only": timed(STOCK), "load": LOAD}))
    assert by_goal["--kv-policy none is"][1] is holds


@pytest.mark.parametrize(("host_seconds", "holds"), [(0.02, True), (0.03, False)])
def test_events_are_compared_with_the_prefill_that_hides_them(
    host_seconds: float, holds: bool
) -> None:
    policy = {"policy": "adakv+criticalkv", "seconds": 0.1, "host_seconds": host_seconds}
    row = {**EVENT, "prompt": 1024, "prefill_seconds": 0.025, "policies": [policy]}
    longer = {**row, "prompt": 8192, "prefill_seconds": 0.25}
    by_goal = reached(events=[row, longer])["the prefill hides"]
    assert by_goal == (f"at most {host_seconds / 0.025:.0%} of the prefill, at 1,024 tokens", holds)
    # Nothing is known of 1,024 tokens.
    assert not reached(events=[longer])["the prefill hides"][1]
    assert reached(decode=[DECODE]) == {}
