"""Draft models beside compression: their layers have blocks of their own, which no event frees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.engine.test_speculation import CHECKED, NOTED, requests, settings
from tests.tiny_models import prompt


@pytest.fixture(scope="module")
def target(model_directory: Path) -> str:
    """A model whose first layer alone says much of what the whole model does."""

    def change(model: Any) -> None:
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.data.mul_(0.02)
            layer.mlp.down_proj.weight.data.mul_(0.02)

    return str(tiny_models.build("llama", model_directory / "few-changes", change=change))


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
    weights = {
        name.removeprefix("model."): weight * (0.02 if "o_proj" in name or "down" in name else 1)
        for name, weight in load_file(Path(target) / "model.safetensors").items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    size = config["hidden_size"]
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    save_file(weights, directory / "model.safetensors")
    return str(directory)


def draft_model(path: str, number: int = 3) -> dict[str, Any]:
    """Returns the speculative config of a draft model."""
    return {"method": "draft_model", "model": path, "num_speculative_tokens": number}


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
    first = [request("first", common + prompt(60, seed=1), 40)]
    others = [request("second", common + prompt(90, seed=2), 40)]
    others += [request(f"grows-{i}", prompt(150, seed=10 + i), 200) for i in range(6)]
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


def test_outputs_with_eagle_are_those_without(target: str, eagle: str, run_engine: Run) -> None:
    """Its layers read hidden states, which depend on events; prefix hits are of both models."""
    phases = [requests()[:2], [request("second", prompt(700, 0)[:650] + prompt(90, seed=2), 40)]]
    given = {"settings": settings("chunk:128,decode:20"), "probes": [NOTED], "environment": CHECKED}
    plain = run_engine(target, phases, **given)
    drafts = {**draft_model(eagle), "method": "eagle"}
    report = run_engine(target, phases, speculative_config=drafts, **given)
    check_drafted(report, plain)


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
