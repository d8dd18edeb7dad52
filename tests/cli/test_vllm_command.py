from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.cli.vllm_command import option_values, read_request
from vllm_kvcompress.errors import ConfigError

PLUGIN = {"scheduler-cls": "our.Scheduler", "worker-cls": "our.Worker", "block-size": "32"}
FLAGS = {"policy": "snapkv", "budget": "0.25"}


@pytest.fixture(autouse=True)
def any_policy_and_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts any policy and profile, which have their own tests."""
    monkeypatch.setattr("vllm_kvcompress.policies.resolve_settings", lambda settings: None)
    monkeypatch.setattr("os.path.isfile", lambda path: True)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return str(path)


def additional(command: list[str]) -> dict[str, Any]:
    values = option_values(command, "--additional-config")
    assert len(values) == 1
    return json.loads(values[0])


def test_without_settings_the_command_is_unchanged() -> None:
    arguments = ["m", "--port", "80", "--additional_config", '{"x": 1}']
    command = read_request({}, None, arguments).command(PLUGIN)
    assert command == ["serve", "m", "--port", "80", "--additional-config", '{"x": 1}']
    assert read_request({}, None, ["m"]).command(PLUGIN) == ["serve", "m"]


@pytest.mark.parametrize(
    ("flags", "default"),
    [
        ({"policy": "auto"}, ("attention+headkv", True)),
        ({"policy": "spans"}, ("spans", False)),
        ({"policy": "auto", "profile": "mine.json"}, ("attention+headkv", False)),
    ],
)
@pytest.mark.parametrize("as_option", [False, True])
def test_auto_finds_measured_heads_in_the_models_folder(
    tmp_path: Path, flags: dict[str, str], default: tuple[str, bool], as_option: bool
) -> None:
    heads = tmp_path / "kv_heads.json"
    heads.write_text("{}")
    arguments = ["--model", str(tmp_path)] if as_option else [str(tmp_path)]
    settings = read_request(flags, None, arguments).settings
    assert settings is not None
    policy, by_itself = default
    assert settings.policy == policy
    assert settings.profile == (str(heads) if by_itself else flags.get("profile"))


def test_auto_without_a_file_is_measured_unless_it_may_not_be(tmp_path: Path) -> None:
    for measures, policy in ((True, "attention+headkv"), (False, "spans")):
        flags = {"policy": "auto", "measure_heads": measures}
        settings = read_request(flags, None, [str(tmp_path)]).settings
        assert settings is not None
        assert (settings.policy, settings.profile) == (policy, None)


def test_policy_none_serves_stock_vllm_whatever_yaml_says(tmp_path: Path) -> None:
    path = write(tmp_path, "kvcompress: {policy: snapkv, budget: 0.5}\nport: 80\n")
    command = read_request({"policy": "none"}, path, ["m"]).command(PLUGIN)
    assert command == ["serve", "m", "--port", "80"]


def test_flags_fill_in_everything_that_compression_needs() -> None:
    command = read_request(FLAGS, None, ["m", "--port", "80"]).command(PLUGIN)
    assert command[:4] == ["serve", "m", "--port", "80"]
    for name, value in PLUGIN.items():
        assert option_values(command, f"--{name}") == [value]
    section = {"policy": "snapkv", "budget": 0.25, "trigger": "prompt"}
    assert additional(command) == {"kvcompress": section}


@pytest.mark.parametrize(
    "given", [["--block-size", "64"], ["--block-size=64"], ["--block_size=64"]]
)
def test_the_users_block_size_wins(given: list[str]) -> None:
    command = read_request(FLAGS, None, ["m", *given]).command(PLUGIN)
    assert option_values(command, "--block-size") == ["64"]


def test_block_size_from_yaml_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "block_size: 64\n")
    command = read_request(FLAGS, path, ["m"]).command(PLUGIN)
    assert option_values(command, "--block-size") == ["64"]


@pytest.mark.parametrize("name", ["--worker-cls", "--scheduler_cls"])
def test_another_worker_or_scheduler_is_refused(name: str) -> None:
    request = read_request(FLAGS, None, ["m", name, "their.Class"])
    with pytest.raises(ConfigError, match="attaches to vLLM"):
        request.command(PLUGIN)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["--logits-processors", "our.Check"]),
        (["--logits-processors", "a.A", "b.B"], ["--logits-processors", "our.Check", "a.A", "b.B"]),
        (["--logits_processors=a.A"], ["--logits-processors", "our.Check", "a.A"]),
    ],
)
def test_our_request_check_joins_the_users_logits_processors(
    given: list[str], expected: list[str]
) -> None:
    options = {"logits-processors": "our.Check"}
    command = read_request(FLAGS, None, ["m", *given]).command(options)
    start = command.index("--logits-processors")
    assert command[start : start + len(expected)] == expected
    assert command.count("--logits-processors") == 1


def test_our_own_classes_may_be_given(tmp_path: Path) -> None:
    command = read_request(FLAGS, None, ["m", "--worker-cls=our.Worker"]).command(PLUGIN)
    assert option_values(command, "--worker-cls") == ["our.Worker"]


def test_command_line_wins_over_yaml_setting_by_setting(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        additional-config: {theirs: {a: 1}, kvcompress: {min_tokens: 5, budget: 0.9}}
        kvcompress:
          policy: snapkv
          budget: 0.5
          trigger: chunk:64
          params: {window_size: 16, kernel_size: 5}
        """,
    )
    flags = {"budget": "0.25", "params": {"window_size": 32}}
    command = read_request(flags, path, ["m"]).command(PLUGIN)
    assert additional(command) == {
        "theirs": {"a": 1},
        "kvcompress": {
            "policy": "snapkv",
            "budget": 0.25,
            "trigger": "chunk:64",
            "params": {"window_size": 32, "kernel_size": 5},
            "min_tokens": 5,
        },
    }


@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", '{"theirs": 1, "kvcompress": {"budget": 0.5}}'],
        ['--additional-config={"theirs": 1, "kvcompress": {"budget": 0.5}}'],
        ["--additional-config.theirs", "1", "--additional-config.kvcompress.budget", "0.5"],
        ["--additional_config.theirs=1", "--additional_config.kvcompress.budget=0.5"],
    ],
)
def test_additional_config_merges_over_yaml(tmp_path: Path, given: list[str]) -> None:
    path = write(tmp_path, "kvcompress: {policy: snapkv, budget: 0.25}\n")
    command = read_request({}, path, ["m", *given, "--port", "80"]).command(PLUGIN)
    config = additional(command)
    assert config["theirs"] == 1
    assert config["kvcompress"]["policy"] == "snapkv"
    assert config["kvcompress"]["budget"] == 0.5
    assert command[:4] == ["serve", "m", "--port", "80"]


def test_yaml_becomes_arguments_as_in_vllm(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        model: from-yaml
        port: 80
        enforce-eager: true
        enable_prefix_caching: false
        served-model-name: [a, b]
        compilation-config: {mode: 0}
        api-key: null
        middleware: []
        """,
    )
    expected = ["--port", "80", "--enforce-eager", "--no-enable-prefix-caching"]
    expected += ["--served-model-name", "a", "b", "--compilation-config", '{"mode": 0}']
    assert read_request({}, path, []).vllm_arguments == ["from-yaml", *expected]
    # What the command line says comes later, and wins in vLLM's parser.
    from_cli = read_request({}, path, ["m", "--port", "81"]).vllm_arguments
    assert from_cli == ["m", *expected, "--port", "81"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kvcompress: snapkv\n", "kvcompress: expected settings"),
        ("kvcompress: {policy: snapkv, budget: 0.5, bugdet: 1}\n", "bugdet is not known"),
        ("kvcompress: {budget: 0.5}\n", "policy .* is missing"),
        (
            "kvcompress: {policy: snapkv, budget: 0.5, params: 3}\n",
            "params .* should be a valid dictionary, found 3",
        ),
        ("- a\n", "expected options of vllm serve"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_wrong_files_are_refused_in_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read_request({}, write(tmp_path, text), ["m"])
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="check the path"):
        read_request({}, "/no/such/file.yaml", ["m"])


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    assert read_request({}, write(tmp_path, "# nothing\n"), ["m"]).settings is None


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "JSON object")])
def test_wrong_additional_config_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_request(FLAGS, None, ["m", "--additional-config", text])
