"""Attention with biases by distance (Inkling): what compressed heads read, and what they keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.conftest import request
from tests.engine.latent_cases import check_stock
from tests.engine.oracle import visible_positions
from tests.gpu_path import inkling
from tests.gpu_path.conftest import Run
from tests.gpu_path.test_models import written
from tests.tiny_models import prompt

BLOCK, EXTENT = 32, 48
LAYERS = [f"model.layers.{layer}.attn" for layer in (1, 3)]  # with full attention
LONG = prompt(500, seed=1)
ADAKV = {"policy": "adakv", "budget": 0.25}
CHECKED = {"KVCOMPRESS_CHECK": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written("InklingForCausalLM", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def run(model: str, run_gpu_path: Run) -> Run:
    """Runs the tiny model with plain operators, or those of another probe."""

    def run(phases: Any, probe: str = "replace_kernels", **options: Any) -> dict[str, Any]:
        probes = ["plain_models", f"tests.gpu_path.inkling:{probe}"]
        engine = {"load_format": "dummy", **inkling.ENGINE, **options}
        return run_gpu_path(model, phases, probes=probes, **engine)

    return run


@pytest.fixture(scope="module")
def check(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Asserts that a request's answer follows from a prompt of which heads see what they kept.

    The same engine without compression reads it, and its kernel hides evicted tokens where they
    are, from the first token behind an event on.
    """

    def check(
        output: dict[str, Any], tokens: list[int], records: list[dict[str, Any]], ends: list[int]
    ) -> list[list[list[list[int]]]]:
        visible = visible_positions(records, len(LAYERS), ends)
        hidden: dict[str, Any] = {name: [] for name in LAYERS}
        for end, layers in zip(ends, visible, strict=True):
            full, near = set(range(end // BLOCK * BLOCK)), range(end - EXTENT + 1, end)
            for name, heads in zip(LAYERS, layers, strict=True):
                hidden[name].append([end, [sorted(full - set(kept)) for kept in heads]])
                assert all(full & set(near) <= set(kept) for kept in heads)
        path = tmp_path_factory.mktemp("hidden") / "tokens.json"
        path.write_text(json.dumps(hidden))
        answer = len(output["tokens"])
        environment = {inkling.HIDDEN: str(path)}
        expected = run([[request("one", tokens, answer)]], "hide_tokens", environment=environment)
        check_stock(output, expected["outputs"]["one"])
        return visible

    return check


def test_heads_attend_at_true_distances_from_event_to_event(run: Run, check: Any) -> None:
    """Events follow chunks, the prompt and 32 tokens; the first chunk is within the budget."""
    settings = {**ADAKV, "trigger": ["chunk:128", "decode:32"]}
    phases = [[request("long", LONG, 60)]]
    report = run(phases, settings=settings, record_kept=True, environment=CHECKED)
    ends = [256, 384, 500, 532]
    visible = check(report["outputs"]["long"], LONG, report["kept"], ends)
    lengths = [len(kept) for layers in visible for heads in layers for kept in heads]
    assert len(set(lengths)) > 1, "heads differ"


@pytest.mark.parametrize("policy", ["h2o", "adakv+criticalkv"])
def test_policies_keep_the_tokens_that_have_a_bias(run: Run, check: Any, policy: str) -> None:
    settings = {**ADAKV, "policy": policy}
    report = run([[request("a", LONG, 6)]], settings=settings, record_kept=True)
    check(report["outputs"]["a"], LONG, report["kept"], [len(LONG)])


def test_what_follows_a_context_reads_what_is_kept_of_it(run: Run, check: Any) -> None:
    named = request("named", LONG, 12, xargs={"kv_context_tokens": 384})
    report = run([[named]], settings=ADAKV, record_kept=True, environment=CHECKED)
    check(report["outputs"]["named"], LONG, report["kept"], [384])


def test_events_without_room_for_near_tokens_are_left_out(run: Run) -> None:
    """A quarter of the prompt is fewer tokens than have a bias."""
    short = request("short", LONG[: 3 * EXTENT], 12)
    report = run([[short]], settings=ADAKV)
    stock = run([[short]])
    assert report["skipped"] == {"adakv protected_tokens": 1}
    check_stock(report["outputs"]["short"], stock["outputs"]["short"])
