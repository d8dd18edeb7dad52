"""Memory pressure: stock vLLM while blocks are free, then compression instead of preemption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.engine.kv_events import announcing
from tests.engine.oracle import KeptTokensDecoder, kept_positions
from tests.tiny_models import prompt

BLOCK, LAYERS = 32, 3
PRESSURE = {"policy": "adakv", "budget": 0.25, "trigger": "pressure:0.9"}


def load(count: int, size: int, output: int) -> list[dict[str, Any]]:
    return [request(f"r{i}", prompt(size + 7 * i, seed=i), output, at_step=i) for i in range(count)]


def test_without_pressure_outputs_are_those_of_stock_vllm(llama: str, run_engine: Run) -> None:
    """There is no event either, even behind a prefix-cache hit."""
    phases = [load(4, 300, 60), [request("again", prompt(300, seed=0), 20)]]
    stock = run_engine(llama, phases)
    ours = run_engine(llama, phases, settings=PRESSURE)
    for name, output in stock["outputs"].items():
        assert ours["outputs"][name]["tokens"] == output["tokens"], name
    assert ours["events"] == []
    assert ours["outputs"]["again"]["cached"] > 0
    # Beside its tokens a request holds a block with its last 32 queries of 4 heads.
    last = [held["r0"] for held in ours["held"] if "r0" in held][-1]
    assert last == math.ceil((300 + 60) / BLOCK) + 1


def test_requests_are_compressed_instead_of_preempted(llama: str, run_engine: Run) -> None:
    """Answers outgrow the pool, so that stock vLLM preempts requests over and over."""
    requests = load(6, 300, 250)
    tight = {"num_gpu_blocks_override": 75, "max_model_len": 640}
    stock = run_engine(llama, [requests], **tight)
    ours = run_engine(llama, [requests], settings=PRESSURE, record_kept=True, **tight)
    assert stock["preemptions"] > 0
    assert ours["preemptions"] == 0
    assert all(len(output["tokens"]) == 250 for output in ours["outputs"].values())
    assert {event["trigger"] for event in ours["events"]} == {"pressure"}
    assert ours["free_at_end"] == ours["num_blocks"] - 1
    # Events never gain more blocks than the statistics called reclaimable.
    assert any(gained for _, gained in ours["reclaimable"])
    assert all(gained <= promised for promised, gained in ours["reclaimable"])
    assert ours["reclaimable"][-1] == [0, 0]
    # Every event observed a full window of queries, prompt queries among them.
    assert {record["num_queries"] for record in ours["kept"]} == {32}


def test_waiting_request_is_admitted_by_compressing_a_running_one(
    llama: str, run_engine: Run
) -> None:
    """A second prompt does not fit beside the first, so that stock vLLM makes it wait."""
    requests = [
        request("long", prompt(1500, seed=1), 200),
        request("waits", prompt(900, seed=2), 20, at_step=20),
    ]
    pool = {"num_gpu_blocks_override": 65, "max_model_len": 1800}
    stock = run_engine(llama, [requests], **pool)
    ours = run_engine(llama, [requests], settings=PRESSURE, **pool)
    side_by_side = [held for held in ours["held"] if len(held) == 2]
    assert len(side_by_side) >= 20
    assert stock["outputs"]["waits"]["tokens"] == ours["outputs"]["waits"]["tokens"]
    assert [event["trigger"] for event in ours["events"]] == ["pressure"]
    assert ours["preemptions"] == 0


def test_more_requests_run_than_uncompressed_ones_fit(llama: str, run_engine: Run) -> None:
    """The pool fits three uncompressed requests; room to compress one in is always left."""
    requests = [request(f"r{i}", prompt(1000, seed=i), 100) for i in range(9)]
    pool = {"num_gpu_blocks_override": 105, "max_num_seqs": 16}
    stock = run_engine(llama, [requests], **pool)
    ours = run_engine(llama, [requests], settings=PRESSURE, **pool)
    assert max(len(held) for held in ours["held"]) >= 5
    assert len(ours["usage"]) < 0.8 * len(stock["usage"]), "steps"
    assert ours["preemptions"] == 0


def test_output_behind_a_pressure_event_is_that_of_the_kept_tokens(
    llama: str, run_engine: Run
) -> None:
    """Compares the answer behind one event with a decoder that has only the kept tokens."""
    tokens = prompt(1000, seed=3)
    report = run_engine(
        llama,
        [[request("a", tokens, 60)]],
        settings=PRESSURE,
        record_kept=True,
        num_gpu_blocks_override=44,  # 43 blocks, of which the prompt takes 32
        max_model_len=1088,
    )
    assert [event["trigger"] for event in report["events"]] == ["pressure"]
    promised, gained = next(each for each in report["reclaimable"] if each[1])
    assert promised == gained  # the only request, so it is all there is
    record, output = report["kept"][0], report["outputs"]["a"]
    source = record["source"][0]
    end, read = source + record["tail"], tokens + output["tokens"]
    assert end > len(tokens)
    decoder = KeptTokensDecoder(llama, read[:end], kept_positions(report["kept"], LAYERS), source)
    logits = decoder.first_logits  # of the event's own step, which saw everything
    for token, logprobs in list(zip(output["tokens"], output["logprobs"], strict=True))[
        end - len(tokens) :
    ]:
        expected = logits.log_softmax(0)
        for candidate, logprob in logprobs.items():
            assert float(expected[int(candidate)]) == pytest.approx(logprob, abs=2e-3)
        logits = decoder.step(token)


@pytest.mark.parametrize("trigger", ["prompt,pressure:0.9", "chunk:256,pressure:0.8"])
def test_pressure_trigger_works_beside_other_triggers(
    llama: str, run_engine: Run, trigger: str, tmp_path: Path
) -> None:
    """After every step, blocks that are announced to routers are in the prefix cache."""
    requests = load(8, 400, 300)
    report = run_engine(
        llama,
        [requests],
        settings={**PRESSURE, "trigger": trigger},
        num_gpu_blocks_override=50,
        max_model_len=800,
        **announcing(tmp_path),
    )
    assert report["kv_events"]["stored"] > report["kv_events"]["removed"] > 50
    assert all(len(output["tokens"]) == 300 for output in report["outputs"].values())
    assert "pressure" in {event["trigger"] for event in report["events"]}
    assert report["free_at_end"] == report["num_blocks"] - 1
