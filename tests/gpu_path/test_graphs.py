"""Whole decode steps as CUDA graphs replay them, which run no Python of a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import request
from tests.gpu_path.conftest import Run
from tests.gpu_path.graphs import IN_GRAPHS, SIZES
from tests.tiny_models import prompt

STEP = ["forward begins", "forward ends", "sampled"]
LAYERS = 3  # of the model, each of which launches what is left without Python
LAUNCHES = ("write_cache", "decode_rows")
POLICIES = {
    "decode": {"policy": "snapkv", "budget": 0.3, "trigger": "prompt,decode:8"},
    "pressure": {"policy": "snapkv", "budget": 0.3, "trigger": "pressure:0.5"},
    "biased": {"policy": "kvslimmer", "budget": 0.3, "trigger": "prompt,decode:8"},
    "corrected": {"policy": "momentkv", "budget": 0.3, "trigger": "prompt,decode:8"},
}
PROBES = {"biased": ["two_tables"]}
BLOCKS = {
    "decode": {"num_gpu_blocks_override": 400, "max_num_seqs": 8},
    "pressure": {"num_gpu_blocks_override": 60, "max_num_seqs": 8, "max_model_len": 700},
}


def requests() -> list[list[dict[str, Any]]]:
    """They join and leave, up to more than are captured; some stay uncompressed."""
    return [
        [
            request("long", prompt(500, seed=1), 40),
            request("short", prompt(5, seed=2), 30),
            request("late", prompt(300, seed=3), 20, at_step=8),
            request("later", prompt(200, seed=4), 12, at_step=16),
            request("last", prompt(40, seed=5), 6, at_step=18),
        ]
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_replayed_steps_equal_eager_steps(
    llama: str, run_gpu_path: Run, run_engine: Run, name: str
) -> None:
    """Both equal the CPU build, which has neither graphs nor these kernels, and whose events run
    inside the forward pass. In the debug mode."""
    settings, pool = POLICIES[name], BLOCKS["pressure" if name == "pressure" else "decode"]
    expected = run_engine(
        llama, requests(), settings=settings, record_kept=True, max_num_batched_tokens=256, **pool
    )
    report = run_gpu_path(
        llama,
        requests(),
        settings=settings,
        record_kept=True,
        asynchronous=name != "pressure",  # or room is looked for in other steps
        environment={"KVCOMPRESS_CHECK": "1"},
        **IN_GRAPHS | {"probes": [*IN_GRAPHS["probes"], *PROBES.get(name, [])]},
        **pool,
    )
    for request_id, output in expected["outputs"].items():
        assert report["outputs"][request_id]["tokens"] == output["tokens"], request_id
    assert [event["kept"] for event in report["kept"]] == [e["kept"] for e in expected["kept"]]
    steps, replays = report["steps"], report["replays"]
    assert {int(size) for size in replays} == set(SIZES)
    assert sum(replays.values()) == steps["decodes"] - steps["in Python"] >= 20
    assert min(steps[kind] for kind in ("mixed", "events", "observed", "in Python")) > 0
    more = ["correct_with_moments"] if name == "corrected" else []
    launches = dict.fromkeys((*LAUNCHES, *more), LAYERS)
    assert report["captures"] == 2 * [len(SIZES) * [launches]]  # first to measure them
    assert report.get("two_tables", 5) >= 5
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_queries_of_lone_last_tokens_count(llama: str, run_gpu_path: Run) -> None:
    """Such a step is replayed: an event's queries are recorded, as when the prompt is read in other
    chunks. Of those that score a context nobody sees one that is alone, so none is."""
    context, other = prompt(320, seed=6), prompt(161, seed=7)
    xargs = {"kv_context_tokens": 320, "kv_prepare": 1}
    report = run_gpu_path(
        llama,
        [
            [request("one behind", [*context, 7], 1, xargs=xargs)],
            [request("one too many", [*context[::-1], *range(5, 166)], 1, xargs=xargs)],
            [request("lone", other, 2)],
            [request("first", prompt(100, seed=8), 2), request("again", other, 2, salt="salt")],
        ],
        settings={"policy": "snapkv", "budget": 0.3, "reuse_contexts": True},
        record_kept=True,
        max_num_batched_tokens=160,
        **IN_GRAPHS,
    )
    triggers = [event["trigger"] for event in report["events"]]
    assert triggers == ["prepare", "prepare", "prompt", "prompt", "prompt"]
    assert report["skipped"] == {}
    assert sum(report["replays"].values()) == report["steps"]["decodes"] == 3
    kept = [record["kept"] for record in report["kept"]]
    assert kept[2 * LAYERS : 3 * LAYERS] == kept[4 * LAYERS :]
    assert len(kept) == 5 * LAYERS


@pytest.mark.parametrize("how", ["replayed", "eager"])
def test_no_token_waits_for_an_event_that_can_run_later(
    llama: str, run_gpu_path: Run, how: str
) -> None:
    """Events run behind sampling, in steps that are replayed and beside a prompt that is read, but
    for those that look at queries which only the forward pass has: a prompt's own."""
    report = run_gpu_path(
        llama,
        [
            [
                request("decodes", prompt(200, seed=1), 80),
                request("beside", prompt(900, seed=2), 70, at_step=6),
                request("no queries", prompt(201, seed=3), 2, xargs={"kv_policy": "knorm"}),
            ]
        ],
        settings={
            "policy": "snapkv",
            "budget": 0.3,
            "trigger": "prompt,decode:8",
            "request_policies": ["knorm"],
        },
        max_num_batched_tokens=512,
        **IN_GRAPHS | {"probes": [*IN_GRAPHS["probes"], "order"], "enforce_eager": how == "eager"},
    )
    steps: list[list[str]] = []
    for what in report["order"]:
        if what == STEP[0]:
            steps.append([])
        steps[-1].append(what)
    inside, behind = set(), set()
    for step in steps:
        if "sampled" in step:
            inside.update(step[: step.index("sampled")])
            behind.update(step[step.index("sampled") :])
    assert inside - set(STEP) == {"prompt snapkv"}
    assert behind - set(STEP) == {"decode snapkv", "prompt knorm"}
