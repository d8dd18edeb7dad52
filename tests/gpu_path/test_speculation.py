"""Speculative decoding with model runner V2, which drafts with kernels and classes of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.conftest import Drafting
from tests.engine.conftest import request
from tests.engine.test_draft_models import WHOLE
from tests.engine.test_speculation import CHECKED, NGRAM, NOTED
from tests.gpu_path.conftest import Run
from tests.gpu_path.test_latent import ENGINE
from tests.tiny_models import prompt

PHASES = [
    [
        request("a", prompt(170, seed=1), 36),
        request("b", prompt(250, seed=2), 30, at_step=3),
        request("c", prompt(170, seed=16), 36, at_step=5),
    ],
    [request("whole", prompt(250, seed=3), 12, **WHOLE)],
    [request("again", prompt(250, seed=3)[:240] + prompt(30, seed=4), 12, **WHOLE)],
]
SETTINGS = {"policy": "adakv", "budget": 0.25, "trigger": "chunk:64,decode:12"}
COMPRESSED = {"settings": {**SETTINGS, "request_policies": ["none"]}, "environment": CHECKED}
HOW: dict[str, Any] = {"asynchronous": False, "probes": [NOTED, "drafted"]}


def test_outputs_are_those_without_drafts(llama: str, run_gpu_path: Run) -> None:
    requests = [request("a", prompt(170, seed=1), 36)]
    given: dict[str, Any] = {
        "settings": SETTINGS,
        "asynchronous": False,  # as vLLM decides by itself
        "probes": [NOTED],
        "environment": CHECKED,
    }
    plain = run_gpu_path(llama, [requests], **given)
    report = run_gpu_path(llama, [requests], speculative_config=NGRAM, **given)
    assert 0 < report["drafts"][1] < report["drafts"][0]
    assert sorted(report["positions"]) == sorted(plain["positions"])
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


@pytest.fixture(scope="module")
def run_without(run_gpu_path: Run) -> Run:
    """Runs `PHASES` without drafts, once for every model."""
    return cache(lambda model: run_gpu_path(model, PHASES, **COMPRESSED, **HOW))


@pytest.mark.parametrize(
    ("method", "cached"),
    [("draft_model", 192), ("eagle3", 128), ("mtp", 128)],  # in blocks of 64; vLLM drops the last
)
def test_outputs_with_layers_that_draft_are_those_without(
    method: str, cached: int, drafting: Drafting, run_gpu_path: Run, run_without: Run
) -> None:
    """What is drafted for requests that are not compressed is what stock vLLM drafts."""
    served, drafts = drafting(method)
    how = {**HOW, "speculative_config": drafts}
    plain = run_without(served)
    report = run_gpu_path(served, PHASES, **COMPRESSED, **how)
    assert 0 < report["drafts"][1] < report["drafts"][0]
    assert sorted(report["positions"]) == sorted(plain["positions"])
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
    assert report["outputs"]["again"]["cached"] == cached
    stock = run_gpu_path(served, PHASES[1:], **how)
    for name in ("whole", "again"):
        assert report["drafted"][name] == stock["drafted"][name], name


PROMPTS_ONLY: dict[str, Any] = {
    "settings": {**SETTINGS, "trigger": "prompt", "request_policies": ["none"]},
    "environment": CHECKED,
    "probes": [NOTED, "drafted"],
}


@pytest.mark.parametrize(
    "method",
    ["draft_model", "eagle3", "mtp", "windows", "sinks", "head-sizes", "shared", "both"],
)
def test_asynchronous_steps_are_planned_before_drafts_are_accepted(
    method: str, drafting: Drafting, run_gpu_path: Run
) -> None:
    """Where events are those of prompts, whose lengths are known whatever is accepted."""
    served, drafts = drafting(method)
    plain = run_gpu_path(served, PHASES, **PROMPTS_ONLY)
    report = run_gpu_path(served, PHASES, **PROMPTS_ONLY, speculative_config=drafts)
    assert 0 < report["drafts"][1] < report["drafts"][0]
    assert report["prompt_events"] == {"after_first_token": 3}
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
    stock = run_gpu_path(
        served, PHASES[1:], probes=PROMPTS_ONLY["probes"], speculative_config=drafts
    )
    for name in ("whole", "again"):
        assert report["drafted"][name] == stock["drafted"][name], name


LONG = [
    [
        request("a", prompt(170, seed=1), 100),
        request("b", prompt(250, seed=2), 90, at_step=3),
        request("c", prompt(170, seed=16), 100, at_step=5),
    ]
]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("draft_model", {"policy": "keydiff", "trigger": "chunk:64,decode:12"}),
        ("eagle3", {"policy": "adakv", "trigger": "prompt,decode:48"}),
        ("mtp", {"policy": "snapkv", "ceiling": 128}),
    ],
)
def test_asynchronous_steps_end_drafts_before_events_while_generating(
    method: str, settings: dict[str, Any], drafting: Drafting, run_gpu_path: Run
) -> None:
    """Events come where they come without drafts, whatever is accepted in steps under way."""
    served, drafts = drafting(method)
    given: dict[str, Any] = {
        "settings": {"budget": 0.25, **settings},
        "environment": CHECKED,
        "probes": [NOTED],
    }
    plain = run_gpu_path(served, LONG, **given)
    report = run_gpu_path(served, LONG, **given, speculative_config=drafts)
    assert 0 < report["drafts"][1] < report["drafts"][0]
    assert len(plain["positions"]) > len(LONG[0])
    assert sorted(report["positions"]) == sorted(plain["positions"])
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


@pytest.mark.parametrize("how", ["ngram", "mtp"])
def test_drafts_are_verified_in_mla_layers(how: str, drafting: Drafting, run_gpu_path: Run) -> None:
    """Requests verify different numbers of tokens, some over kept rows and some over all."""
    served, drafts = drafting("latent")
    settings = {"policy": "snapkv", "budget": 0.25, "request_policies": ["none", "keydiff"]}
    phases = [
        [
            request("a", prompt(170, seed=1), 36),
            request("b", prompt(250, seed=2), 30, at_step=3, xargs={"kv_policy": "keydiff"}),
            request("beside", prompt(120, seed=5), 36, at_step=5, **WHOLE),
        ],
        *PHASES[1:],
    ]
    with_events = {"ngram": "chunk:64,decode:12", "mtp": "prompt"}[how]
    given: dict[str, Any] = {
        "asynchronous": how == "mtp",
        "probes": PROMPTS_ONLY["probes"],
        **ENGINE,
    }
    ours = {"settings": {**settings, "trigger": with_events}, "environment": CHECKED, **given}
    speculation = NGRAM if how == "ngram" else drafts
    plain = run_gpu_path(served, phases, **ours)
    report = run_gpu_path(served, phases, **ours, speculative_config=speculation)
    assert 0 < report["drafts"][1] < report["drafts"][0]
    assert len(report["events"]) == len(plain["events"]) > 0
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
    if how == "mtp":
        stock = run_gpu_path(
            served,
            PHASES[1:],
            **given,
            speculative_config=speculation,
            attention_backend="TRITON_MLA",
        )
        for name in ("whole", "again"):
            assert report["drafted"][name] == stock["drafted"][name], name


@pytest.mark.parametrize(
    ("method", "num_blocks"), [("draft_model", 34), ("head-sizes", 40), ("shared", 56)]
)
def test_preempted_requests_draft_in_asynchronous_steps(
    method: str, num_blocks: int, drafting: Drafting, run_gpu_path: Run
) -> None:
    """They read prompt and answer again, whose event comes at the same place."""
    served, drafts = drafting(method)
    requests = [request(f"r{i}", prompt(60 + 20 * i, seed=i), 100) for i in range(5)]
    plain = run_gpu_path(served, [requests], **PROMPTS_ONLY)
    report = run_gpu_path(
        served,
        [requests],
        **PROMPTS_ONLY,
        speculative_config=drafts,
        num_gpu_blocks_override=num_blocks,
        max_model_len=400,
    )
    assert report["preemptions"] > 0
    assert report["drafts"][1] > 0
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
