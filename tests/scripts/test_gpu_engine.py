"""gpu_check's parts `engine` and `decode-only`, with this build's engine over a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from gpu_parts.engine import EnginePlan, measure_engines, serve_call
from gpu_parts.report import as_markdown, engine_passed
from gpu_parts.served import serve_options, write_8b_shape

ROOT = next(folder for folder in Path(__file__).parents if folder.name == "tests").parent
ENGINE = {"enforce_eager": True, "dtype": "float32", "num_gpu_blocks_override": 120}
SETTINGS = {"policy": "adakv+criticalkv", "budget": 0.25, "trigger": "prompt"}


def served_together(llm: Any, call: tuple[Any, ...]) -> Any:
    """Wraps `serve_call` to report which events ran in one batch, and in how many layers."""
    from vllm_kvcompress.compression.runner import EventRunner

    if not hasattr(EventRunner, "told"):
        EventRunner.told = []
        batches = EventRunner.batches

        def telling(self: Any, *args: Any) -> Any:
            made = batches(self, *args)
            EventRunner.told += [
                (len(batch.events), max(len(part.layers) for part in batch.layers))
                for batch in made
            ]
            return made

        EventRunner.batches = telling
    answer = serve_call(llm, call)
    return {**answer, "together": list(EventRunner.told)} if call[0] == "path" else answer


def test_engines_batch_events_like_a_server(llama: str, tmp_path: Path) -> None:
    """Compressed first; events run together and over several layers, and figures are written after
    every engine and every case."""
    plan = EnginePlan(
        llama,
        SETTINGS,
        ENGINE,
        names=("compressed", "stock", "off"),
        requests=4,
        prompt=400,
        output=4,
        batches=(1, 3),
        lengths=(300,),
        steps=8,
    )
    saved: list[str] = []
    run = measure_engines(
        plan, tmp_path / "logs", lambda run: saved.append(json.dumps(run)), handle=served_together
    )
    assert engine_passed(run), as_markdown({**REPORT, "engine": {plan.label: run}})
    engines = run["engines"]
    assert list(engines) == ["compressed", "stock", "off"]
    seen = [list(json.loads(text)["engines"]) for text in saved]
    assert seen.count(["compressed"]) == 5  # after both loads, both cases, and at the end
    ours, stock = engines["compressed"], engines["stock"]
    assert [engines[name]["load"]["events"] for name in engines] == [{"prompt": 2}, {}, {}]
    together = ours["path"]["together"]
    assert max(events for events, _ in together) >= 2
    assert max(layers for _, layers in together) >= 2
    assert stock["path"]["together"] == []
    assert ours["load"]["replies"] == stock["load"]["replies"]
    assert len(stock["load"]["replies"]) == 2
    assert 0 < ours["load"]["first_token_seconds"] < ours["load"]["seconds"]
    for name, engine in engines.items():
        for row, batch in zip(engine["decode_only"], (1, 3), strict=True):
            assert (row["length"], row["batch"], row["steps"]) == (300, batch, 8)
            assert row["others"] == row["events"] == 0
            assert row["events_before"] == (batch if name == "compressed" else 0)
            assert row["seconds"] > 0
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in tmp_path.rglob("*"))


def test_decode_steps_are_timed_after_prefill_and_oversized_cases_are_left_out(
    llama: str, tmp_path: Path
) -> None:
    """Five prompts take 38 steps here, while the first request decodes."""
    engine = {**ENGINE, "max_num_batched_tokens": 40, "max_num_seqs": 8}
    plan = EnginePlan(
        llama,
        SETTINGS,
        engine,
        names=("compressed",),
        requests=0,
        batches=(5, 64),
        lengths=(300,),
        steps=8,
    )
    run = measure_engines(plan, tmp_path, lambda _: None)
    timed, other = run["engines"]["compressed"]["decode_only"]
    assert (timed["others"], timed["events_before"]) == (0, 5)
    assert other["left_out"].endswith("tokens do not fit 3808")
    late = measure_engines(plan, tmp_path, lambda _: None, deadline=0.0)
    assert late["engines"]["compressed"]["refused"].startswith("not started")
    assert not engine_passed(late)


REPORT = {"device": "x", "versions": {}, "quick": False}


def test_engine_options_are_those_of_serve(llama: str) -> None:
    """The options that `serve` prints, and vLLM's defaults for servers."""
    command = [sys.executable, "-m", "vllm_kvcompress.cli.main", "serve", llama]
    command += [f"--kv-{name}={value}" for name, value in SETTINGS.items()]
    printed = subprocess.run(
        [*command, "--print-vllm-command=yaml", "--no-kv-status-page"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    expected = {
        name.replace("-", "_"): value for name, value in yaml.safe_load(printed.stdout).items()
    }
    assert expected.pop("model") == llama
    options = serve_options(llama, SETTINGS, {"max_model_len": 800})
    assert options.pop("max_model_len") == 800
    of_servers = {name: options.pop(name) for name in ("max_num_batched_tokens", "max_num_seqs")}
    assert of_servers == {"max_num_batched_tokens": 2048, "max_num_seqs": 128}  # on CPUs
    assert {name: _plain(value) for name, value in options.items()} == {
        name: _plain(value) for name, value in expected.items()
    }
    stock = serve_options(llama, None, {})
    assert {name for name in stock if name not in of_servers} == {"block_size"}
    assert stock["block_size"] is None  # vLLM's own


def _plain(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def test_pool_option_holds_that_many_uncompressed_requests(llama: str) -> None:
    plan = EnginePlan(llama, SETTINGS, {}, requests=6, prompt=400, output=10, pool=2)
    options = plan.options("compressed")
    assert options["num_gpu_blocks_override"] == 2 * 13 + 1  # of 32 tokens each
    assert {len(prompt) for prompt in plan.prompts(1)} == {400}
    assert (plan.num_long, plan.label) == (6, "prompt, pool of 2")


def test_checked_engines_fail_if_kernels_compile_while_serving(llama: str) -> None:
    plan = EnginePlan(llama, SETTINGS, {}, checked=True)
    assert plan.options("stock")["jit_monitor_mode"] == "error"
    assert "jit_monitor_mode" not in EnginePlan(llama, SETTINGS, {}).options("stock")


def test_the_shape_of_8b_is_a_model_for_vllm(tmp_path: Path) -> None:
    options = serve_options(str(write_8b_shape(tmp_path)), None, {"load_format": "dummy"})
    assert options["load_format"] == "dummy"
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (32, 8)


def test_measured_engines_have_no_observers() -> None:
    for path in (ROOT / "scripts" / "gpu_parts").glob("*.py"):
        assert "runner.observer =" not in path.read_text(), path


def test_engine_parts_can_be_rehearsed_on_a_cpu(llama: str, tmp_path: Path) -> None:
    """The script itself, from its command line to its report."""
    script = ROOT / "scripts" / "gpu_check.py"
    command = f"--rehearse --part capture engine decode-only --model {llama} --out {tmp_path}"
    command += " --requests 2 --prompt 300 --output 40 --kv-trigger prompt,decode:16"
    command += " --batches 2 --lengths 300 --steps 4 --profile"
    command += " --engines compressed stock"
    for name, value in ENGINE.items():
        command += f" --engine {name}={json.dumps(value)}"
    done = subprocess.run(
        [sys.executable, script, *command.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    text = (tmp_path / "gpu-cpu.md").read_text()
    # Nothing is captured here, so the part fails, and nothing behind it is measured.
    assert done.returncode == 1
    assert "| eager | momentkv | 1, 4, 16 | 2 | 12 |" in text
    assert "Whole engines" not in text
    done = subprocess.run(
        [sys.executable, script, *command.replace("capture ", "").split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "gpu-cpu.md").read_text()
    assert "## Whole engines, events by prompt,decode:16" in text
    assert "| 1 prompt, 1 decode |" in text
    assert "| 300 | 2 |" in text
    assert "The same requests under torch's profiler: compressed " in text
    assert (tmp_path / "engine-prompt-decode-16-stock.trace.json.gz").stat().st_size
    assert "| eager | momentkv |" in text  # of the earlier call
    assert "steps never take longer" not in done.stdout  # too short for a goal
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in tmp_path.rglob("*"))
