"""MLA beside linear attention: blocks are as long as a state, and divided into pages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.engine.latent_cases import check_stock, settings_for
from tests.engine.latent_oracle import check_logits
from tests.gpu_path import kimi, ling
from tests.gpu_path.test_families import check_outputs
from tests.tiny_models import prompt

POLICIES = ["snapkv", "keydiff", "snapkv+criticalkv"]
SETTINGS = {**settings_for(POLICIES), "trigger": "prompt"}
ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "trust_remote_code": True,
    "skip_tokenizer_init": True,
}
DECODERS = {ling: ling.LingDecoder, kimi: kimi.KimiDecoder}
LONG, SHORT = prompt(470, seed=1), prompt(50, seed=2)
BLOCK, PAGE, CONTEXT = 128, 64, 384
BLOCKS = 13  # for two long prompts, but not for what they generate
TOGETHER = [request("long", LONG, 6), request("short", SHORT, 6, at_step=1)]
AGAIN = request("again", LONG, 2)
PHASES = [
    *([request(name, LONG, 6, xargs={"kv_policy": name}, salt=name)] for name in POLICIES),
    [request("named", LONG, 3, xargs={"kv_context_tokens": CONTEXT}, salt="named")],
    TOGETHER,
    [{**one, "id": f"whole {one['id']}", "xargs": {"kv_budget": 1.0}} for one in TOGETHER],
    [{**AGAIN, "xargs": {"kv_budget": 1.0}}],
]


@pytest.fixture(scope="module", params=DECODERS, ids=["ling", "kimi"])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def model(family: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(family.build(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def run(family: Any, model: str, run_gpu_path: Run) -> Run:
    """Runs the model in chunks of at most 256 tokens."""
    engine = {**ENGINE, "probes": [f"{family.__name__}:replace_kernel"]}
    return lambda *phases, **options: run_gpu_path(model, *phases, **{**engine, **options})


@pytest.fixture(scope="module")
def stock(run: Run) -> dict[str, Any]:
    outputs: dict[str, Any] = run([TOGETHER, [AGAIN]], attention_backend="TRITON_MLA")["outputs"]
    return outputs


@pytest.fixture(scope="module")
def report(run: Run) -> dict[str, Any]:
    checked = {"KVCOMPRESS_CHECK": "1"}
    return run(PHASES, settings=SETTINGS, record_kept=True, environment=checked)


def test_budget_one_gives_the_tokens_and_logprobs_of_stock(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    for name in ("long", "short"):
        check_stock(report["outputs"][f"whole {name}"], stock[name])


def test_a_repeated_prompt_has_stocks_prefix_hit(
    report: dict[str, Any], stock: dict[str, Any]
) -> None:
    assert report["outputs"]["again"]["cached"] == stock["again"]["cached"] > 0
    check_stock(report["outputs"]["again"], stock["again"])


def test_requests_together_are_those_alone(report: dict[str, Any], stock: dict[str, Any]) -> None:
    outputs = report["outputs"]
    assert outputs["long"]["tokens"] == outputs["snapkv"]["tokens"] != stock["long"]["tokens"]
    assert outputs["short"]["tokens"] == stock["short"]["tokens"]
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_preempted_requests_answer_as_alone(run: Run) -> None:
    """Blocks run out while both generate uncompressed tokens."""
    whole = {"kv_budget": 1.0}
    both = [request(name, LONG, 50, xargs=whole, salt=name) for name in ("first", "second")]
    phases = [[request("alone", LONG, 50, xargs=whole)], both]
    report = run(phases, settings=SETTINGS, num_gpu_blocks_override=BLOCKS)
    assert report["preemptions"] > 0
    for one in both:
        check_outputs(report["outputs"][one["id"]], report["outputs"]["alone"], 1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_quarter_of_the_rows_is_kept_in_pages_and_read(
    family: Any, model: str, report: dict[str, Any], policy: str
) -> None:
    number, num_full = POLICIES.index(policy), len(LONG) // PAGE * PAGE
    kept = kept_rows(report, number)
    assert all(len(set(rows)) == len(rows) == 2 * PAGE for rows in kept)
    event = report["events"][number]
    assert (event["blocks_freed"], event["blocks_written"]) == (num_full // BLOCK, 1)
    decoder, output = DECODERS[family](model, LONG), report["outputs"][policy]
    check_logits(decoder.logits, output["logprobs"][0], 0)
    decoder.forget(kept, num_full)
    check_decoding(decoder, output)


def test_the_rest_of_a_prompt_reads_the_kept_rows_of_its_context(
    family: Any, model: str, report: dict[str, Any]
) -> None:
    decoder, output = DECODERS[family](model, LONG[:CONTEXT]), report["outputs"]["named"]
    decoder.forget(kept_rows(report, len(POLICIES)), CONTEXT)
    for token in LONG[CONTEXT:]:
        decoder.logits = decoder.step(token)
    check_logits(decoder.logits, output["logprobs"][0], 0)
    check_decoding(decoder, output)


def kept_rows(report: dict[str, Any], event: int) -> list[list[int]]:
    """Returns what both MLA layers keep at an event."""
    records = report["kept"][2 * event :][:2]
    assert [record["layer"] for record in records] == [0, 1]
    return [record["kept"] for record in records]


def check_decoding(decoder: ling.LingDecoder, output: dict[str, Any]) -> None:
    """Asserts that all tokens behind the first one are the decoder's."""
    for number, token in enumerate(output["tokens"][:-1], start=1):
        check_logits(decoder.step(token), output["logprobs"][number], number)
