"""Every form of --print-vllm-command means the same to vLLM's own parser."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm import AsyncEngineArgs

from tests.cli.server_process import plain_arguments
from tests.cli.test_serve import CONFIGS
from vllm_kvcompress.cli import launch
from vllm_kvcompress.cli.main import main

POLICY = ["--kv-policy", "snapkv", "--kv-budget", "0.25", "--kv-trigger", "prompt,decode:64"]
EVERYTHING = [
    *["m", *POLICY, "--kv-param", "window_size=16", "--kv-allow-request-policies", "keydiff,none"],
    *["--kv-min-request-budget", "0.1", "--kv-max-request-budget", "0.5", "-tp", "2"],
    *["--served-model-name", "80", "a b", "--max-model-len", "32k", "--port", "8123"],
    *["--no-enable-prefix-caching", "--enforce-eager", "--compilation-config", '{"mode": 0}'],
    *["--additional-config", '{"theirs": {"a": "it\'s", "b": []}}', "--api-key", "1e5"],
    "--middleware=one.Two",
]


def printed(form: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve", f"--print-vllm-command={form}", *arguments]) == 0
    return capsys.readouterr().out


def parsed(command: list[str]) -> dict[str, Any]:
    namespace = launch.parse(command)[1]
    assert pickle.loads(pickle.dumps(namespace)) == namespace  # what several API servers get
    options = vars(namespace)
    model = options.pop("model_tag") or options["model"]
    return {**options, "model": model, "config": None}


def as_yaml(text: str, folder: Path) -> dict[str, Any]:
    path = folder / "printed.yaml"
    path.write_text(text)
    return parsed(["serve", "--config", str(path)])


@pytest.mark.parametrize(
    "arguments",
    [EVERYTHING, *(["--config", str(path)] for path in CONFIGS)],
    ids=["everything", *(path.stem for path in CONFIGS)],
)
def test_every_printed_form_parses_to_the_same_options(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = parsed(plain_arguments(printed("shell", arguments, capsys)))
    assert expected["additional_config"]["kvcompress"]["policy"]
    assert as_yaml(printed("yaml", arguments, capsys), tmp_path) == expected
    listed = yaml.safe_load(printed("args", arguments, capsys))
    assert parsed(["serve", *listed]) == expected
    assert not [argument for argument in listed if "{" in argument and "mode" not in argument]

    ray = yaml.safe_load(printed("ray", arguments, capsys))
    model = ray["model_loading_config"]
    assert model["model_source"] == expected["model"]
    assert model["model_id"] == (expected["served_model_name"] or [expected["model"]])[0]
    engine = vars(AsyncEngineArgs(model=expected["model"], **ray["engine_kwargs"]))
    untouched = vars(AsyncEngineArgs(model=expected["model"]))
    defaults = parsed(["serve", expected["model"]])  # some of which are not the engine's own
    for name in (engine.keys() & expected.keys()) - {"served_model_name"}:
        if engine[name] != untouched[name] or expected[name] != defaults[name]:
            assert engine[name] == expected[name], name


def test_form_is_only_accepted_behind_an_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the option would take the model for a form."""
    assert main(["serve", *POLICY, "--print_vllm_command", "yaml"]) == 0
    assert plain_arguments(capsys.readouterr().out)[:2] == ["serve", "yaml"]
    with pytest.raises(SystemExit):
        main(["serve", "m", *POLICY, "--print-vllm-command=toml"])


def test_ray_form_names_the_options_that_ray_sets(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "m", *POLICY, "--port", "8123", "--print-vllm-command=ray"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == "vllm-kvcompress: left out, Ray Serve has its own: --port\n"
    assert "8123" not in captured.out


def test_options_that_yaml_cannot_express_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["m", *POLICY, "--middleware", "one.Two", "--middleware", "three.Four"]
    assert main(["serve", *arguments, "--print-vllm-command=yaml"]) == 2
    assert "--middleware is given 2 times" in capsys.readouterr().err
    assert parsed(["serve", *yaml.safe_load(printed("args", arguments, capsys))])["middleware"] == [
        *("one.Two", "three.Four"),
    ]


@pytest.mark.parametrize(
    "value",
    [
        *("4k", "true", "null", "Infinity", "", "-1", "0.5", "a=b", "./x.json", "a b", '"'),
        *(4, 0.25, True, None, [], ["a", "b"], ["a,b"], [1, 2], {}, {"x": "4k"}, {"x.y": 1}),
    ],
)
def test_dotted_options_keep_every_value(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["m", *POLICY, "--additional-config", json.dumps({"theirs": {"a": value}})]
    listed = yaml.safe_load(printed("args", arguments, capsys))
    assert parsed(["serve", *listed])["additional_config"]["theirs"] == {"a": value}
