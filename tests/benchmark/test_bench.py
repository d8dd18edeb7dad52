"""`vllm-kvcompress bench`: loads, ratios and reports; and real engines on a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.benchmark import report
from vllm_kvcompress.tools.benchmark.measure import Benchmark, engine_options, summarize
from vllm_kvcompress.tools.benchmark.scenarios import SCENARIOS, Size
from vllm_kvcompress.tools.benchmark.shapes import VOCABULARY, ModelShape

TINY = "layers=2,hidden=64,heads=2,kv_heads=2,head_size=32,dtype=float32"
FIGURES = {
    "decode_throughput": 100.0,
    "request_throughput": 2.0,
    "output_throughput": 50.0,
    "ttft": 0.5,
    "tpot": 0.01,
    "decode_step": 0.02,
    "decode_attention": 0.0,
    "hit_rate": 0.0,
    "peak_running": 4,
    "peak_usage": 0.9,
    "preemptions": 0,
    "events": 0,
    "shadows": 0,
    "scheduler_per_request": 5e-5,
    "timeline": {"seconds": [0.1, 0.2], "running": [1, 2], "usage": [0.5, 0.9]},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_loads_fit_their_pool_and_say_the_same_for_a_seed(scenario: str) -> None:
    size = Size(requests=8, prompt=2048, output=64)
    load = SCENARIOS[scenario](size)
    arrivals = load.arrivals(random.Random(3))
    again = load.arrivals(random.Random(3))
    assert arrivals == again
    assert arrivals != load.arrivals(random.Random(4))
    lengths: dict[str, int] = {}
    for arrival in arrivals:
        assert all(0 <= token < VOCABULARY for token in arrival.tokens)
        before = lengths[arrival.follows] if arrival.follows else 0
        lengths[arrival.name] = before + len(arrival.tokens) + arrival.max_tokens
    assert max(lengths.values()) <= load.max_model_len
    whole = max(lengths.values()) / load.pool_tokens
    assert whole > 3 if scenario == "oversize" else whole <= 1


def test_two_engines_fit_a_gpu_and_capture_graphs_there_unless_the_user_says_otherwise() -> None:
    asked = {"gpu_memory_utilization": 0.3}
    plain, given = (
        Benchmark("pool", Size(), ModelShape(), {}, 1, engine) for engine in ({}, asked)
    )
    on_gpu, on_cpu = (engine_options(plain, cpu) for cpu in (False, True))
    assert 2 * on_gpu["gpu_memory_utilization"] < 1
    assert not on_gpu["enforce_eager"]
    assert "gpu_memory_utilization" not in on_cpu
    assert on_cpu["enforce_eager"]
    assert engine_options(given, cpu=False)["gpu_memory_utilization"] == 0.3


def test_four_whole_requests_fit_the_limited_pool() -> None:
    load = SCENARIOS["pool"](Size(requests=9, prompt=1000, output=24))
    assert load.pool_tokens == 4 * 1024
    assert load.engine_options["num_gpu_blocks_override"] == 4 * 32 + 1


def runs(factor: float) -> list[dict[str, Any]]:
    """Three repetitions; the second one in a slow minute of the machine."""
    slow = [1.0, 3.0, 1.2]
    return [
        {**FIGURES, "decode_throughput": 100 * factor / s, "tpot": 0.01 * s / factor} for s in slow
    ]


def test_ratios_are_of_the_same_turn() -> None:
    result = summarize({"stock": runs(1), "compressed": runs(2)})
    assert result["ratios"]["decode_throughput"] == pytest.approx(2)
    assert result["ratios"]["tpot"] == pytest.approx(0.5)
    assert result["ratios"]["ttft"] == 1
    assert "decode_attention" not in result["ratios"], "of nothing there is no ratio"
    assert result["medians"]["stock"]["decode_throughput"] == pytest.approx(100 / 1.2)
    assert result["timelines"]["stock"] == FIGURES["timeline"]


def test_without_stock_there_are_figures_and_no_ratios() -> None:
    result = summarize({"stock": [], "compressed": runs(1)})
    assert result["ratios"] == {}
    assert set(result["medians"]) == {"compressed"}


def test_report(tmp_path: Path) -> None:
    benchmark = Benchmark(
        "pool", Size(4, 512, 16), ModelShape(), {"policy": "adakv", "budget": 0.25}, 3, {}
    )
    result = {**summarize({"stock": runs(1), "compressed": runs(2)}), "refused": {}}
    written = report.write(benchmark, result, tmp_path)
    assert [path.name for path in written] == ["pool.json", "pool.md", "pool.svg"]
    figures = json.loads(written[0].read_text())
    assert figures["ratios"]["decode_throughput"] == pytest.approx(2)
    assert figures["settings"] == {"policy": "adakv", "budget": 0.25}
    table = written[1].read_text()
    assert "| tokens/s while decoding | 83 | 167 | 2.00x |" in table
    assert "| preemptions | 0 | 0 |  |" in table
    assert "of it attention" not in table
    assert "pool in use" in written[2].read_text()


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was stopped goes on with the next scenario; other questions are asked."""
    asked: list[str] = []

    def measure(benchmark: Benchmark, log: Path) -> dict[str, Any]:
        asked.append(benchmark.scenario)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {**summarize({"stock": runs(1), "compressed": runs(2)}), "refused": {}}

    monkeypatch.setattr("vllm_kvcompress.cli.bench.measure", measure)
    command = ["bench", "--scenario", "pool", "--scenario", "off", "--out", str(tmp_path)]
    assert main(command) == 130
    capsys.readouterr()
    assert main(command) == 0
    assert asked == ["pool", "off", "off"]
    told = capsys.readouterr().out
    assert "pool: measured before" in told
    assert told.count("| tokens/s while decoding | 83 | 167 | 2.00x |") == 2
    assert main([*command, "--engine", "seed=1"]) == 0
    assert asked == ["pool", "off", "off", "pool", "off"]
    (tmp_path / "pool.json").write_text("[")
    assert main([*command, "--engine", "seed=1"]) == 0
    assert asked[5:] == ["pool"]


@pytest.mark.parametrize("text", ["layers", "depth=3", "layers=-1", "layers=2.5"])
def test_shapes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=NUMBER with one of layers, hidden"):
        ModelShape.parse(text)


def bench(directory: Path, scenario: str, *options: str) -> dict[str, Any]:
    """Runs the command on the tiny model; returns the JSON."""
    arguments = ["bench", "--scenario", scenario, "--out", str(directory), "--shape", TINY]
    assert main([*arguments, "--repeats", "1", *options]) == 0
    figures: dict[str, Any] = json.loads((directory / f"{scenario}.json").read_text())
    return figures


def test_more_requests_at_once_from_the_same_pool(tmp_path: Path) -> None:
    options = ["--requests", "8", "--prompt", "512", "--output", "32", "--kv-budget", "0.25"]
    figures = bench(tmp_path, "pool", *options)
    stock, ours = figures["medians"]["stock"], figures["medians"]["compressed"]
    assert stock["peak_running"] == 4
    assert ours["peak_running"] == 8
    assert ours["preemptions"] == 0
    assert (stock["events"], ours["events"]) == (0, 8)
    for name, figure in figures["repetitions"].items():
        assert len(figure) == 1, name
        assert figure[0]["output_throughput"] == pytest.approx(8 * 32 / figure[0]["seconds"])
    assert {"decode_throughput", "request_throughput", "ttft", "tpot"} <= set(figures["ratios"])


def test_answers_are_scored_again_between_arrivals(tmp_path: Path) -> None:
    """All requests are sampled; stock scores no answer."""
    options = ["--requests", "6", "--prompt", "1024", "--output", "16", "--kv-shadow", "1"]
    figures = bench(tmp_path, "mixed", *options)
    assert figures["settings"]["shadow"] == 1
    assert figures["medians"]["stock"]["shadows"] == 0
    assert figures["medians"]["compressed"]["shadows"] > 0


def test_a_prompt_that_stock_refuses_is_served(tmp_path: Path) -> None:
    figures = bench(tmp_path, "oversize", "--prompt", "4096", "--output", "8")
    assert "larger than the available KV cache memory" in figures["refused"]["stock"]
    assert figures["medians"]["compressed"]["peak_usage"] <= 1
    assert figures["ratios"] == {}
    assert "stock does not start: " in (tmp_path / "oversize.md").read_text()


def test_conversations_hit_the_prefix_cache_as_stock_does(tmp_path: Path) -> None:
    options = ["--requests", "8", "--prompt", "1500", "--output", "16"]
    figures = bench(tmp_path, "chat", *options)
    assert figures["medians"]["stock"]["hit_rate"] > 0.5
    assert figures["ratios"]["hit_rate"] > 0.9


def test_attention_is_timed_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And without --kv-budget half is kept, which is said."""
    figures = bench(tmp_path, "long-decode", "--prompt", "1024", "--output", "8")
    assert figures["settings"]["budget"] == 0.5
    assert "long-decode: policy adakv, budget 0.5 of each prompt (the" in capsys.readouterr().out
    for engine in ("stock", "compressed"):
        medians = figures["medians"][engine]
        assert 0 < medians["decode_attention"] < medians["decode_step"]
