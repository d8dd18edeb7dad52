from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vllm_kvcompress.cli.main import main
from vllm_kvcompress.policies import all_policies
from vllm_kvcompress.policies.policy import Stages


def test_list_names_every_policy_parameter_and_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for info in all_policies():
        assert f"{info.name} {info.summary}" in text
        assert info.paper in text
        for parameter in info.parameters():
            assert f"{parameter.name} {parameter.default} {parameter.meaning}" in text


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == [info.name for info in all_policies()]
    critical = next(entry for entry in listed if entry["name"] == "criticalkv")
    assert critical["kind"] == "modifier"
    assert "snapkv" in critical["modifies"]
    assert {p["name"]: p["default"] for p in critical["parameters"]}["alpha"] == 0.5


@pytest.mark.parametrize("flag_first", [True, False])
def test_explanation_lists_the_modifier_as_the_part_of_its_stage(
    flag_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", "adakv+criticalkv"]
    arguments = ["--json", *arguments] if flag_first else [*arguments, "--json"]
    assert main(["policies", *arguments]) == 0
    explained = json.loads(capsys.readouterr().out)
    parts = [(stage["stage"], stage["part"]) for stage in explained["stages"]]
    assert parts == [
        ("score", "adakv"),
        ("protect", "adakv"),
        ("allocate", "adakv"),
        ("select", "criticalkv"),
    ]


def test_explanation_can_be_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "explain", "keydiff+window"]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["keydiff+window"] in lines
    assert any(line[:2] == ["protect", "window"] for line in lines)
    assert any(line[:2] == ["allocate", "(default)"] for line in lines)
    assert any(line[:2] == ["anchor", "mean_normalized"] for line in lines)


def test_auto_is_explained_as_what_it_stands_for_with_measured_heads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["policies", "explain", "auto"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("auto stands for attention+headkv;")
    assert "attention+headkv" in text.splitlines()
    assert "or heads that the engine measures" in text


def test_explanation_names_the_protocol_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "explain", "kvslimmer"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trigger", "chunk:512"] in lines
    assert ["budget", "2048", "tokens", "per", "KV", "head"] in lines
    assert main(["policies", "explain", "keydiff+window", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["protocol"] == {"trigger": "chunk:128,decode:16", "budget": None}


def test_stages_are_explained_in_the_order_in_which_they_run() -> None:
    """Merging comes before correcting, whatever the order in Python's set."""
    explained = subprocess.run(
        [sys.executable, "-m", "vllm_kvcompress.cli.main", "policies", "explain", "momentkv"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    first_words = [line.split()[0] for line in explained.stdout.splitlines() if line.strip()]
    assert first_words[2:8] == list(Stages._fields)  # behind the policy's name and the heading


def test_policies_name_no_other_stages() -> None:
    assert {name for info in all_policies() for name in info.stages.non_empty()} == set(
        Stages._fields
    )


@pytest.mark.parametrize("policy", ["headkv", "duoattention", "triattention"])
def test_policies_with_a_profile_are_explained_without_it(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", "explain", policy]) == 0
    assert "--kv-profile FILE" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["nonsense", "criticalkv", "keydiff+criticalkv", ""])
def test_unknown_policies_and_wrong_parameters_are_refused(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", "explain", policy]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--kv-policy snapvk --kv-budget .5", "policies are streamingllm"),
        ("--kv-policy keydiff+criticalkv --kv-budget .5", "goes with"),
        ("--kv-policy snapkv --kv-budget .5 --kv-param windowsize=3", "has no parameter"),
        ("--kv-policy headkv --kv-budget .5 --no-kv-measure-heads", "--kv-profile"),
    ],
)
def test_serve_refuses_policies_before_vllm_starts(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.err.count("\n") == 1
