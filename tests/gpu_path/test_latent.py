"""MLA on the GPU path: stock at budget 1.0, and compressed what plain loops compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.engine.latent_cases import (
    LONG,
    NAMED,
    SHORT,
    TOGETHER,
    WHOLE,
    check_kept_rows,
    check_named_context,
    check_quarter,
    check_stock,
    settings_for,
)
from tests.engine.latent_oracle import (
    BLOCK,
    LatentDecoder,
    attentions,
    check_decoding,
    records,
)
from tests.gpu_path.test_families import check_outputs
from tests.tiny_models import prompt

PREPARED = prompt(320, seed=6)  # whole blocks
REPEATED = PREPARED + prompt(8, seed=8) + PREPARED
POLICIES = ["snapkv", "keydiff", "adakv+criticalkv"]
SETTINGS = settings_for(POLICIES)
ENGINE = {"max_model_len": 1024, "block_size": BLOCK}
PHASES = [
    *([request(name, LONG, xargs={"kv_policy": name}, salt=name)] for name in POLICIES),
    [{**NAMED, "salt": "named"}],
    TOGETHER,
    WHOLE,
    [request("again", LONG, xargs={"kv_budget": 1.0})],
]
CHECKED = {"KVCOMPRESS_CHECK": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.build("deepseek_v2", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def stock(model: str, run_gpu_path: Run) -> dict[str, Any]:
    engine = {"attention_backend": "TRITON_MLA", **ENGINE}
    outputs: dict[str, Any] = run_gpu_path(model, [TOGETHER], **engine)["outputs"]
    return outputs


@pytest.fixture(scope="module", params=["V2", "V1"])
def report(request: pytest.FixtureRequest, model: str, run_gpu_path: Run) -> dict[str, Any]:
    """Prompts are read in chunks of at most 256 tokens."""
    return run_gpu_path(
        model,
        PHASES,
        settings=SETTINGS,
        record_kept=True,
        runner=request.param,
        asynchronous=request.param == "V2",
        environment=CHECKED,
        **ENGINE,
    )


def test_budget_one_gives_the_tokens_and_logprobs_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    for name, expected in stock.items():
        check_stock(report["outputs"][f"whole {name}"], expected)


def test_a_quarter_frees_blocks_behind_the_first_token_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    check_quarter(report, stock, len(POLICIES))


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_reads_the_kept_latent_rows(
    model: str, report: dict[str, Any], policy: str
) -> None:
    check_kept_rows(model, report, policy, POLICIES.index(policy))


def test_later_events_and_the_rest_of_a_prompt_read_the_kept_rows(
    model: str, report: dict[str, Any]
) -> None:
    check_named_context(model, report, len(POLICIES))


def test_a_repeated_prompt_has_stocks_prefix_hit(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    output = report["outputs"]["again"]
    assert output["cached"] == len(LONG) // BLOCK * BLOCK
    check_stock(output, stock["long"])


def test_vllms_kernels_read_kept_rows_in_tritons_interpreter(
    tmp_path: Path, run_gpu_path: Run, run_engine: Run
) -> None:
    """Decode steps read in one split and in two, chunks behind a compressed context."""
    model = str(tiny_models.build("deepseek_v2", tmp_path, num_hidden_layers=2))
    most = {"kv_budget": 0.95}  # of 1,100 tokens, which vLLM's kernel divides into two splits
    phases = [
        [request("long", LONG, 3), request("short", SHORT, 3)],
        [request("most", prompt(1100, seed=4), 3, xargs=most)],
        [request("named", LONG[:200], 3, xargs={"kv_context_tokens": 160})],
    ]
    engine = {**ENGINE, "max_model_len": 1200, "num_gpu_blocks_override": 200}
    expected = run_engine(model, phases, settings=SETTINGS, **engine, attention_backend="CPU_MLA")
    found = run_gpu_path(model, phases, settings=SETTINGS, kernels="triton", **engine)
    assert len(found["events"]) == len(expected["events"]) == 4
    for name, output in expected["outputs"].items():
        check_outputs(found["outputs"][name], output, 1e-4)


@pytest.fixture(scope="module")
def kept_states(model: str, run_gpu_path: Run) -> dict[str, Any]:
    """A conversation of two turns, then a context that is prepared for a question."""
    settings = {"reuse_contexts": True, "reuse_conversations": "reuse", "trigger": "prompt"}
    named = {"kv_context_tokens": len(PREPARED)}
    phases = [
        [request("first", LONG, 40)],
        [request("second", prompt(100, seed=5), follows="first")],
        [request("preparing", REPEATED, 1, xargs={**named, "kv_prepare": 1})],
        [request("question", PREPARED + prompt(20, seed=7), xargs=named)],
    ]
    return run_gpu_path(
        model,
        phases,
        settings={"policy": "snapkv", "budget": 0.25, **settings},
        record_kept=True,
        environment=CHECKED,
        **ENGINE,
    )


def test_a_second_turn_goes_on_from_the_kept_rows_of_the_first(
    model: str, kept_states: dict[str, Any]
) -> None:
    assert kept_states["conversations_continued"] == 1
    assert kept_states["outputs"]["second"]["cached"] > len(LONG)
    decoder = LatentDecoder(model, LONG, records(kept_states, 0), len(LONG) // BLOCK * BLOCK)
    second = records(kept_states, 1)
    check_decoding(decoder, kept_states, "second", {len(kept_states["prompts"]["second"]): second})


def test_a_prepared_context_keeps_what_its_repetition_attends_to(
    model: str, kept_states: dict[str, Any]
) -> None:
    """By the largest attention of any query head, which all read the same row."""
    assert kept_states["contexts_reused"] == 1
    assert kept_states["outputs"]["question"]["cached"] == len(PREPARED)
    prepared = records(kept_states, 2)
    for rows, kept in zip(attentions(model, REPEATED), prepared, strict=True):
        best = rows[0, :, len(PREPARED) :, : len(PREPARED)].amax(dim=(0, 1)).tolist()
        evicted, first = set(range(len(PREPARED))) - set(kept), set(range(4))
        assert first < set(kept)
        assert min(best[at] for at in set(kept) - first) > max(best[at] for at in evicted) - 1e-6
    decoder = LatentDecoder(model, PREPARED, prepared, len(PREPARED))
    check_decoding(decoder, kept_states, "question", {})


def test_attention_over_latent_rows_is_compiled_before_requests(
    model: str, run_gpu_path: Run
) -> None:
    """At every number of splits; memory for events is left beside the cache."""
    named = {"kv_context_tokens": 160}
    phases = [
        [request(f"r{i}", prompt(300, seed=i), 8 + 2 * (3 - i)) for i in range(4)],
        [request("long", prompt(3000, seed=5), 3, xargs={"kv_budget": 0.5})],
        [request("named", prompt(200, seed=6), 2, xargs=named)],
    ]
    engine = {**ENGINE, "max_model_len": 4096, "max_num_batched_tokens": 1024}
    probes = ["latents", "memory"]
    report = run_gpu_path(model, phases, settings=SETTINGS, probes=probes, **engine)
    before, later = report["compiled"]["before"], report["compiled"]["while"]
    assert {kind[0] for kind in later} == {1, 2}
    assert len(later) >= 3
    assert [kind for kind in later if kind not in before] == []
    (event,) = report["measured"]
    assert event["peak"] > 4096 * 576 * 4, "the rows of the longest request"
    assert event["left"] == 0
    assert report["ours"] < report["vllm"]
