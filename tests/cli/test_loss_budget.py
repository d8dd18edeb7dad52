"""Budgets by loss become fractions before anything else sees them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.calibration.test_record import MODEL, POLICY, by_length, calibration
from vllm_kvcompress.cli import bench, serve
from vllm_kvcompress.cli import eval as eval_command
from vllm_kvcompress.cli.main import _parser
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import start_lines
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.budgets import parse_budget, parse_loss
from vllm_kvcompress.tools.calibration.record import conditions_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    return str(path)


def served(*more: str) -> Settings:
    settings = serve.parse_request([MODEL, "--kv-policy", POLICY, *more]).settings
    assert settings is not None
    return settings


def test_losses_are_parsed_and_nothing_else() -> None:
    assert parse_loss("loss:0.02") == 0.02
    assert parse_loss("loss:1") == 1.0
    assert [parse_loss(value) for value in ("0.25", 0.25, 2048, None)] == [None] * 4
    for text in ("loss:", "loss:0", "loss:-1", "loss:nan", "loss:inf", "loss:x"):
        with pytest.raises(ConfigError, match=r"expected loss:F .* such as loss:0\.02"):
            parse_loss(text)


def test_engines_take_no_budget_by_loss() -> None:
    with pytest.raises(ConfigError, match=r"found 'loss:0\.02'.*--print-vllm-command"):
        parse_budget("loss:0.02")
    with pytest.raises(ConfigError, match="--print-vllm-command"):
        Settings.from_dict({"policy": POLICY, "budget": "loss:0.02"})


def test_serve_takes_the_smallest_budget_that_keeps_the_promise(file: str) -> None:
    settings = served("--kv-budget", "loss:0.05", "--kv-calibration", file)
    assert (settings.budget, settings.promised_loss, settings.min_tokens) == (0.5, 0.05, 512)
    assert f"promised to lose at most 0.05 nats per token, by {file}" in start_lines(settings)[0]
    assert Settings.from_dict(settings.to_dict()) == settings
    more = ("--kv-budget", "loss:0.2", "--kv-calibration", file, "--kv-min-tokens", "64")
    settings = served(*more)
    assert (settings.budget, settings.min_tokens) == (0.25, 64)


LENGTHS = {512: (0.3, 0.3), 1024: (0.3, 0.0), 2048: (0.3, 0.3), 4096: (0.0, 0.0)}


def test_longer_prompts_have_budgets_of_their_own(tmp_path: Path) -> None:
    """No budget will do for texts of 512 and of 2,048 tokens; those of 4,096 lose nothing."""
    path = tmp_path / "calibration.json"
    by_length(LENGTHS).write(path)
    settings = served("--kv-budget", "loss:0.1", "--kv-calibration", str(path))
    assert (settings.budget, settings.min_tokens) == (0.5, 1024)
    assert settings.longer_budgets == {2048: 1.0, 4096: 0.25}
    assert Settings.from_dict(settings.to_dict()) == settings
    line = start_lines(settings)[0]
    assert "budget 0.5 of each prompt, 1 from 2048 tokens on, 0.25 from 4096 tokens on (" in line
    arguments = ["eval", MODEL, "--tasks", "text/prose", "--policies", POLICY, "--out", "x"]
    arguments += ["--budgets", "loss:0.1", "--kv-calibration", str(path)]
    with pytest.raises(ConfigError, match=r"a budget by length, 0\.5 from 1024 tokens on, then"):
        eval_command.plan_of(_parser("eval").parse_args(arguments))


def test_all_budgets_of_auto_are_of_one_policy(tmp_path: Path) -> None:
    """Below a quarter `auto` is another policy, and a server has one of them."""
    found = dataclasses.replace(by_length(LENGTHS), policy="auto", budgets=(0.1, 0.5))
    path = tmp_path / "calibration.json"
    conditions = conditions_of({"policy": "auto"}, MODEL)
    dataclasses.replace(found, conditions=conditions).write(path)
    more = ("--kv-policy", "auto", "--kv-budget", "loss:0.1", "--kv-calibration", str(path))
    assert served(*more).longer_budgets == {2048: 1.0, 4096: 0.5}


def test_yaml_may_say_it_too(tmp_path: Path, file: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"model: {MODEL}\nkvcompress: {{policy: snapkv, budget: loss:0.05, calibration: {file}}}\n"
    )
    settings = serve.parse_request(["--config", str(path)]).settings
    assert settings is not None
    assert settings.budget == 0.5


def test_a_promise_that_no_budget_keeps_leaves_all_whole_and_says_so(file: str) -> None:
    more = ("--kv-budget", "loss:0.001", "--kv-calibration", file, "--kv-shadow", "0.01")
    settings = served(*more)
    assert settings.budget == 1.0
    assert not settings.compresses
    warning = start_lines(settings)[1]
    assert warning.startswith("WARNING: no budget below 1.0 is sure to lose at most 0.001 nats")


def test_without_a_calibration_the_command_that_makes_one_is_named(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        served("--kv-budget", "loss:0.05")
    assert f"no calibration of {MODEL} with policy {POLICY}" in str(caught.value)
    assert f"`vllm-kvcompress calibrate {MODEL} --kv-policy {POLICY}`" in str(caught.value)
    assert str(cache / "kvcompress" / "calibration") in str(caught.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--kv-trigger", "chunk:512"], "of trigger prompt, expected one of chunk:512"),
        (["--kv-ceiling", "512"], r"measures no ceiling \(--kv-ceiling\); leave it out"),
        (["--kv-read", "quest:0.5"], r"measures no read \(--kv-read\)"),
        (["--kv-policy", "adakv"], "of policy snapkv, expected one of adakv"),
        (["--kv-policy", "none", "--kv-allow-request-policies", "snapkv"], "expected a policy"),
        (["--kv-budget", "0.5"], "expected a budget by loss beside it"),
    ],
)
def test_what_was_not_measured_is_refused(file: str, more: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        served("--kv-budget", "loss:0.05", "--kv-calibration", file, *more)


def test_bench_and_eval_take_the_same_budget(file: str, tmp_path: Path) -> None:
    arguments = ["bench", "--scenario", "pool", "--out", str(tmp_path), "--kv-policy", POLICY]
    arguments += ["--kv-budget", "loss:0.05"]
    with pytest.raises(ConfigError, match="random weights has no calibration"):
        bench.benchmark_of("pool", _parser("bench").parse_args(arguments))
    arguments += ["--kv-calibration", file]
    benchmark = bench.benchmark_of("pool", _parser("bench").parse_args(arguments))
    assert benchmark.settings["budget"] == 0.5

    arguments = ["eval", MODEL, "--tasks", "text/prose", "--policies", POLICY, "--out", "x"]
    arguments += ["--budgets", "0.1,loss:0.05", "--kv-calibration", file]
    plan = eval_command.plan_of(_parser("eval").parse_args(arguments))
    assert [setup.name for setup in plan.setups] == ["full", "snapkv@0.1", "snapkv@0.5"]
    assert "calibration" not in plan.params
