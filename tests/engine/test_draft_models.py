"""Draft models beside compression: their layers have blocks of their own, which no event frees."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.engine.conftest import Run
from tests.engine.conftest import request as ask
from tests.engine.test_speculation import CHECKED, NOTED, POLICIES, requests, settings
from tests.tiny_models import prompt

WHOLE = {"xargs": {"kv_policy": "none"}}
COMPRESSED = {**settings("chunk:128,decode:20"), "request_policies": [*POLICIES, "none"]}
PHASES = [
    requests()[:2],
    [ask("second", prompt(700, 0)[:650] + prompt(90, seed=2), 40)],
    [ask("whole", prompt(600, seed=3), 40, **WHOLE)],
    [ask("again", prompt(600, seed=3)[:580] + prompt(30, seed=4), 40, **WHOLE)],
]


@pytest.fixture(scope="module")
def target(model_directory: Path) -> str:
    """A model whose first layer alone says much of what the whole model does."""

    directory = model_directory / "few-changes"
    return str(tiny_models.build("llama", directory, change=damp_later_layers))


def damp_later_layers(model: Any) -> None:
    """Has all layers but the first change little."""
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.mul_(0.02)
        layer.mlp.down_proj.weight.data.mul_(0.02)


@pytest.fixture(scope="module")
def first_layer(target: str, model_directory: Path) -> str:
    """The same model without its later layers."""
    directory = model_directory / "first-layer"
    AutoModelForCausalLM.from_pretrained(target, num_hidden_layers=1).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def eagle(target: str, model_directory: Path) -> str:
    """An EAGLE head of a layer, which passes on what it reads: the hidden state before its token.

    So it guesses that tokens come again.
    """
    directory = model_directory / "eagle"
    directory.mkdir()
    config = json.loads((Path(target) / "config.json").read_text()) | {"num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    weights = first_layer_of(target, "layers.0.")
    del weights["layers.0.input_layernorm.weight"]
    size = config["hidden_size"]
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    save_file(weights, directory / "model.safetensors")
    return str(directory)


@pytest.fixture(scope="module")
def eagle3(target: str, model_directory: Path) -> str:
    """An EAGLE3 head, which guesses the same from the states before the target's last layer."""
    directory = model_directory / "eagle3"
    directory.mkdir()
    config = json.loads((Path(target) / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (directory / "config.json").write_text(json.dumps(config))
    weights = first_layer_of(target, "midlayer.")
    size = config["hidden_size"]
    for name in ("q_proj", "k_proj", "v_proj"):  # which also read the token
        key = f"midlayer.self_attn.{name}.weight"
        weights[key] = torch.cat([weights[key], weights[key]], dim=1)
    weights["fc.weight"] = torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1)
    for name in ("norm", "midlayer.hidden_norm"):
        weights[f"{name}.weight"] = torch.ones(size)
    save_file(weights, directory / "model.safetensors")
    return str(directory)


@pytest.fixture(scope="module")
def mimo(model_directory: Path) -> str:
    """A model that has an MTP layer, which guesses the same; its attention is as Qwen2's."""
    model = tiny_models.build("qwen2", model_directory / "mimo", change=damp_later_layers)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    prefix, size = "model.mtp_layers.0.", config["hidden_size"]
    weights = load_file(model / "model.safetensors") | first_layer_of(str(model), prefix)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(size)
    weights[f"{prefix}input_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return str(model)


def first_layer_of(model: str, prefix: str) -> dict[str, Any]:
    """Returns the weights of a model's first layer, which is to change little of what it reads."""
    return {
        prefix + name.partition(".layers.0.")[2]: (
            weight * (0.25 if "o_proj" in name or "down" in name else 1)
        )
        for name, weight in load_file(Path(model) / "model.safetensors").items()
        if ".layers.0." in name
    }


def draft_model(path: str | None, number: int = 3, method: str = "draft_model") -> dict[str, Any]:
    """Returns the speculative config of a draft model, or of a head or layer that drafts."""
    drafts = {"method": method, "num_speculative_tokens": number}
    return drafts if path is None else {**drafts, "model": path}


@pytest.fixture(scope="module")
def outputs_without(run_engine: Run) -> Run:
    """Runs `PHASES` without drafts, once for every model."""
    return cache(
        lambda model: run_engine(
            model, PHASES, settings=COMPRESSED, probes=[NOTED], environment=CHECKED
        )
    )


def check_drafted(report: dict[str, Any], plain: dict[str, Any]) -> None:
    """Checks that some drafts were rejected, and that all else is as without drafts."""
    drafted, accepted = report["drafts"]
    assert 0 < accepted < drafted
    assert sorted(report["positions"]) == sorted(plain["positions"])
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


def test_outputs_with_a_draft_model_are_those_without(
    target: str, first_layer: str, run_engine: Run
) -> None:
    """Events at the same positions; the draft is as large as the model, or a layer of it."""
    given = {"settings": settings("chunk:128,decode:20"), "probes": [NOTED], "environment": CHECKED}
    plain = run_engine(target, [requests()], **given)
    for path in (target, first_layer):
        report = run_engine(target, [requests()], speculative_config=draft_model(path), **given)
        check_drafted(report, plain)


def test_prefix_hits_and_preemption(target: str, first_layer: str, run_engine: Run) -> None:
    """A hit is one of both models; a preempted request reads everything again in both."""
    common = prompt(700, seed=7)
    first = [ask("first", common + prompt(60, seed=1), 40)]
    others = [ask("second", common + prompt(90, seed=2), 40)]
    others += [ask(f"grows-{i}", prompt(150, seed=10 + i), 200) for i in range(6)]
    given = {"settings": settings("prompt"), "probes": [NOTED], "environment": CHECKED}
    plain = run_engine(target, [first, others], **given)
    drafts = draft_model(first_layer)
    report = run_engine(
        target,
        [first, others],
        speculative_config=drafts,
        num_gpu_blocks_override=62,
        max_model_len=1024,
        **given,
    )
    assert report["preemptions"] > 0
    assert report["outputs"]["second"]["cached"] == 640  # in blocks of 64 tokens
    assert report["drafts"][1] > 0
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


@pytest.mark.parametrize(
    ("model", "method"), [("target", "eagle"), ("target", "eagle3"), ("mimo", "mtp")]
)
def test_outputs_with_heads_that_draft_are_those_without(
    model: str, method: str, request: pytest.FixtureRequest, run_engine: Run, outputs_without: Run
) -> None:
    """Their layers read hidden states, which depend on events; prefix hits are of both models.

    The tokens that are drafted for what is not compressed are those of stock vLLM.
    """
    served = request.getfixturevalue(model)
    head = None if method == "mtp" else request.getfixturevalue(method)
    given = {"speculative_config": draft_model(head, method=method), "probes": [NOTED]}
    report = run_engine(served, PHASES, settings=COMPRESSED, environment=CHECKED, **given)
    check_drafted(report, outputs_without(served))
    assert report["outputs"]["second"]["cached"] > 0
    stock = run_engine(served, PHASES[2:], **given)
    assert report["outputs"]["again"]["cached"] == 512  # in blocks of 256 tokens
    for name in ("whole", "again"):
        assert report["drafted"][name] == stock["drafted"][name], name
        assert report["outputs"][name]["tokens"] == stock["outputs"][name]["tokens"], name


def test_uncompressed_requests_accept_what_stock_vllm_does(
    target: str, first_layer: str, run_engine: Run
) -> None:
    """With a budget of 1.0, and beside compression: drafts are those of an untouched cache."""
    given = {"speculative_config": draft_model(first_layer), "probes": [NOTED]}
    stock = run_engine(target, [requests()], **given)
    drafted, accepted = stock["drafts"]
    assert accepted > drafted // 2
    for ours in (settings(budget=1.0), {**settings(), "min_tokens": 1000}):
        report = run_engine(target, [requests()], settings=ours, environment=CHECKED, **given)
        assert report["drafts"] == stock["drafts"]
        for name, expected in stock["outputs"].items():
            assert report["outputs"][name]["tokens"] == expected["tokens"], name
