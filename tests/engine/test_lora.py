"""Models with LoRA adapters are compressed, the adapter's own requests included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import prompt

PROMPT = prompt(640, seed=1)
RANK, ALPHA = 8, 16


@pytest.fixture(scope="module")
def adapter(llama: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A random adapter of queries and output projections, and a model that contains it."""
    directory, merged = (str(tmp_path_factory.mktemp(name)) for name in ("adapter", "merged"))
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            low = 0.1 * torch.randn(RANK, module.in_features, generator=generator)
            high = 0.1 * torch.randn(module.out_features, RANK, generator=generator)
            weights[f"base_model.model.{name}.lora_A.weight"] = low
            weights[f"base_model.model.{name}.lora_B.weight"] = high
            module.weight.data += ALPHA / RANK * high @ low
    save_file(weights, Path(directory, "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": ["q_proj", "o_proj"], "base_model_name_or_path": llama}
    Path(directory, "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged)
    return directory, merged


def test_criticalkv_reads_the_output_projection_beneath_an_adapter(
    llama: str, adapter: tuple[str, str], run_engine: Run
) -> None:
    directory, merged = adapter
    settings = {"policy": "adakv+criticalkv", "budget": 0.25}
    plain = run_engine(llama, [[request("base", PROMPT, 8)]], settings=settings, record_kept=True)
    phases = [[request("base", PROMPT, 8)], [request("adapted", PROMPT, 8, lora=directory)]]
    both = run_engine(
        llama,
        phases,
        settings=settings,
        record_kept=True,
        enable_lora=True,
        max_lora_rank=RANK,
    )
    of_base, of_adapted = both["kept"][:3], both["kept"][3:]
    assert [each["kept"] for each in of_base] == [each["kept"] for each in plain["kept"]]
    assert [each["kept"] for each in of_base] != [each["kept"] for each in of_adapted]
    assert both["outputs"]["base"]["tokens"] == plain["outputs"]["base"]["tokens"]
    check_decoding(merged, PROMPT, of_adapted, both["outputs"]["adapted"])
    assert both["free_at_end"] == both["num_blocks"] - 1
