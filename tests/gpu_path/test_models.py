"""Classes of models that stock vLLM serves on GPUs alone, as in the matrix of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_parts import configs
from tests.engine.conftest import request
from tests.engine.latent_cases import check_stock
from tests.gpu_path import inkling
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

QUARTER = {
    "policy": "snapkv",
    "budget": 0.25,
    "min_request_budget": 0.25,
    "max_request_budget": 1.0,
}
WHOLE = {"kv_budget": 1.0}
PROBES = ["plain_models"]
ENGINE: dict[str, Any] = {"load_format": "dummy", "probes": PROBES}
OPERATORS = {
    "InklingForCausalLM": ["tests.gpu_path.inkling:replace_kernels"],
    "InklingForConditionalGeneration": ["tests.gpu_path.inkling:replace_kernels"],
    "KimiLinearForCausalLM": ["tests.gpu_path.kimi:replace_kernel"],
}
MORE = {name: inkling.ENGINE for name in OPERATORS if name.startswith("Inkling")}


def written(name: str, folder: Path) -> str:
    """Writes the configuration of a tiny model, and a tokenizer; returns their folder."""
    path = configs.write(name, folder)
    configs.write_tokenizer(path)
    return str(path)


@pytest.mark.parametrize("name", sorted(configs.ON_GPUS))
def test_budget_one_is_stock_and_a_quarter_frees_blocks(
    tmp_path: Path, run_gpu_path: Run, name: str
) -> None:
    """Prompts are read in chunks, and others wait or generate beside them."""
    model, long, short = written(name, tmp_path), prompt(500, seed=1), prompt(290, seed=2)
    has_mla = "kv_lora_rank" in json.loads(Path(model, "config.json").read_text())
    stock_mla = {"attention_backend": "TRITON_MLA"} if has_mla else {}
    both = [request("long", long, 24), request("short", short, 24, at_step=2)]
    engine = {**ENGINE, **MORE.get(name, {}), "probes": [*PROBES, *OPERATORS.get(name, ())]}
    stock = run_gpu_path(model, [both], **stock_mla, **engine)
    whole = [{**each, "id": f"whole {each['id']}", "xargs": WHOLE} for each in both]
    found = run_gpu_path(
        model,
        [whole, both, [request("again", long, 24)]],
        settings=QUARTER,
        environment={"KVCOMPRESS_CHECK": "1"},
        **engine,
    )
    outputs = found["outputs"]
    for each, expected in stock["outputs"].items():
        check_stock(outputs[f"whole {each}"], expected)
        assert outputs[each]["tokens"][0] == expected["tokens"][0]
    assert outputs["long"]["tokens"] != stock["outputs"]["long"]["tokens"]
    assert outputs["again"]["tokens"] == outputs["long"]["tokens"], "alone = together"
    freed = [event["blocks_freed"] > event["blocks_written"] for event in found["events"]]
    assert freed == [True] * 3
    assert found["free_at_end"] == found["num_blocks"] - 1


def test_chunks_with_a_look_back_go_through_vllms_triton_kernels(
    tmp_path: Path, run_gpu_path: Run
) -> None:
    """A prompt of several chunks of 32 tokens, in Triton's interpreter and in plain torch."""
    model = written("Rnj1ForCausalLM", tmp_path)
    phases = [[request("long", prompt(140, seed=1), 3)]]
    kept = run_gpu_path(model, phases, settings=QUARTER, kernels="triton", **ENGINE)
    expected = run_gpu_path(model, phases, settings=QUARTER, **ENGINE)
    assert len(kept["events"]) == len(expected["events"]) == 1
    check_stock(kept["outputs"]["long"], expected["outputs"]["long"])
