from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from vllm.v1.sample.logits_processor import LogitsProcessor as V1Processor
from vllm.v1.sample.logits_processor import cached_load_custom_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2Processor
from vllm.v1.worker.gpu.sample.logits_processor.loader import _cached_load_v2_logitsprocs

from tests import tiny_models
from tests.cli.test_status_page import declared_plugins
from tests.forked import command
from vllm_kvcompress import __version__
from vllm_kvcompress.cli import doctor, launch, serve
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.vllm_plugin import request_options
from vllm_kvcompress.vllm_plugin.startup import registration
from vllm_kvcompress.vllm_plugin.startup.versions import VLLM_VERSIONS
from vllm_kvcompress.vllm_plugin.worker_side import layer_check


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With this commit's entry points; vLLM sets variables for its workers while it builds its
    configuration.
    """
    packages = str(declared_plugins(tmp_path / "packages"))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", packages, prepend=os.pathsep)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def fresh_loaders() -> Iterator[None]:
    """Clears vLLM's caches of loaded plugins."""
    caches = (cached_load_custom_logitsprocs, _cached_load_v2_logitsprocs)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_report_names_versions_entry_points_and_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    report = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    report = {name: value.strip() for name, value in report.items()}
    assert report["vllm-kvcompress"] == __version__
    assert report["torch"] == metadata.version("torch")
    assert report["vllm"].startswith("0.32.")
    for number, known in VLLM_VERSIONS.items():
        assert report[f"vllm {number}"] == known
    entry_points = {
        "vllm.general_plugins kvcompress": ":register",
        "vllm.stat_logger_plugins kvcompress": ":CompressionStatLogger",
        "vllm.endpoint_plugins kvcompress-status": ":StatusPage",
        "vllm.endpoint_plugins kvcompress-prompts": ":PromptPlugin",
        "vllm.endpoint_plugins kvcompress-protect": ":ProtectPlugin",
    }
    for name, path in entry_points.items():
        assert report[f"entry point {name}"].endswith(path)
    assert report["--scheduler-cls"].endswith("CompressionScheduler")
    assert report["--worker-cls"].endswith("CompressionCPUWorker")
    assert report["attention (cpu)"].endswith("CompressedCPUBackend")
    for runner in ("V1", "V2"):
        assert report[f"--logits-processors (model runner {runner})"].endswith(":RequestCheck")


@pytest.mark.parametrize(("runner", "other"), [("V1", V2Processor), ("V2", V1Processor)])
def test_request_check_that_a_model_runner_refuses_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fresh_loaders: None,
    runner: str,
    other: type,
) -> None:
    """It can be imported, but each of vLLM's loaders wants its own interface."""
    half = type("HalfCheck", (other,), {"validate_params": classmethod(lambda *_: None)})
    monkeypatch.setattr(request_options, "RequestCheck", half)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (problem,) = [number for number, line in enumerate(lines) if "problem:" in line]
    assert lines[problem - 1].startswith(f"--logits-processors (model runner {runner})")
    assert "subclass of" in lines[problem]


def test_a_class_that_cannot_be_loaded_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        registration, "_CPU", "vllm_kvcompress.vllm_plugin.worker_side.attention.gone.Backend"
    )
    assert main(["doctor"]) == 1
    assert "problem: cannot be loaded (ModuleNotFoundError" in capsys.readouterr().out


def test_a_filter_that_hides_the_plugin_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["doctor"]) == 1
    assert "problem: add kvcompress to it" in capsys.readouterr().out


def test_a_missing_compiler_and_plugin_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "install it" in doctor._compiler().problem
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    for group, name in doctor._ENTRY_POINTS:
        assert "install the package again" in doctor._entry_point(group, name).problem


CONNECT = '--kv-policy snapkv --kv-transfer-config {"kv_role":"kv_both","kv_connector":"%s"}'


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        ("--kv-policy snapkv --kv-budget 0.25", "would accept this"),
        ("--kv-policy auto", "would accept this"),
        ("--kv-policy snapkv --kv-budget 0", "expected a budget"),
        (
            "--kv-policy snapkv --kv-budget 0.25 --kv-cache-dtype nvfp4",
            "its scales lie in an order of their own",
        ),
        ("--kv-policy snapkv --kv-budget 0.25 --pipeline-parallel-size 2", "would accept this"),
        (
            "--kv-policy snapkv --kv-budget 0.25 --disable-hybrid-kv-cache-manager",
            "cannot be told from the layers to compress",
        ),
        (
            "--kv-policy snapkv --kv-budget 1.0 --disable-hybrid-kv-cache-manager",
            "would accept this",
        ),
        (CONNECT % "LMCacheConnectorV1", "LMCacheMPConnector loads before it"),
        (CONNECT % "ExampleConnector", "would accept this"),
    ],
)
def test_doctor_reports_the_refusal_of_serve(arguments: str, verdict: str, tmp_path: Path) -> None:
    """In its own process, since vLLM's configuration changes global state."""
    model = tiny_models.build("llama", tmp_path)
    done = command(tmp_path, "doctor", str(model), *arguments.split())
    assert verdict in done.stdout
    assert done.returncode == (0 if verdict == "would accept this" else 1)
    measures = "heads are measured when the engine starts" in done.stdout
    assert measures == ("auto" in arguments)


ONE_WAY = "no layer in which every token attends to all tokens before it"
SMALL = {name: size for name, size in tiny_models.COMMON.items() if name != "head_dim"}
SLIDING = {**SMALL, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
GEMMA = {**tiny_models.COMMON, **tiny_models.FAMILIES["gemma4"]}
GEMMA["architectures"] = ["Gemma4ForCausalLM"]
PREFIX_LM = {**SMALL, "model_type": "hrm_text", "architectures": ["HrmTextForCausalLM"]}
SINKS = {**tiny_models.COMMON, **tiny_models.FAMILIES["gpt_oss"]}
SINKS["architectures"] = ["GptOssForCausalLM"]


@pytest.mark.parametrize(
    ("config", "policy", "verdict"),
    [
        ({**SLIDING, "sliding_window": 64}, "snapkv", ONE_WAY),
        (PREFIX_LM, "snapkv", ONE_WAY),
        (SINKS, "momentkv", "has attention sinks, which momentkv does not take into account"),
        (SINKS, "snapkv", "would accept this"),
        ({**GEMMA, "num_kv_shared_layers": 2}, "snapkv", "would accept this"),
        (GEMMA, "snapkv", "would accept this"),
    ],
    ids=["sliding", "prefix-LM", "sinks", "with-sinks", "shared", "two-head-sizes"],
)
def test_doctor_reports_what_workers_refuse_of_layers(
    config: dict[str, object], policy: str, verdict: str, tmp_path: Path
) -> None:
    """From the model's config alone: there are no weights."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--kv-policy", policy, "--kv-budget", "0.5", "--max-model-len", "512"]
    done = command(tmp_path, "doctor", str(tmp_path), "--skip-tokenizer-init", *options)
    assert verdict in done.stdout, done
    assert "not checked" not in done.stdout
    assert done.returncode == (0 if verdict == "would accept this" else 1)


def test_a_model_that_cannot_be_built_without_weights_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: object) -> None:
        raise NotImplementedError("no such operator\nfor tensors without numbers")

    model = tiny_models.build("llama", tmp_path)
    monkeypatch.setattr(layer_check, "check_layers", fails)
    monkeypatch.setattr(launch, "check", lambda arguments: None)
    request = serve.parse_request([str(model), "--kv-policy", "snapkv"])
    unchecked = launch.check_command(launch.vllm_command(request))
    assert unchecked == "NotImplementedError: no such operator"
