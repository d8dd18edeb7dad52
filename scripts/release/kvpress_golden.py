"""Runs kvpress on small models and stores what it scores and keeps, for the tests to compare.

    python -m venv kvpress-env
    kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5 "transformers<5.3" prometheus_client
    kvpress-env/bin/python scripts/release/kvpress_golden.py tests/golden

It needs an environment of its own: kvpress 0.5 works with transformers below 5.3 only, and
scripts/measure/kvpress_eval.py wants prometheus_client. Stored per model and layer: keys, values,
queries, how these turn, and o_proj (the inputs that both sides get), and for each press its scores
and a mask of the entries that it keeps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.utils import compute_n_kept, get_prerope_query_states
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import rotate_half

ROOT = Path(__file__).parents[2]
NUM_TOKENS, RATIO, WINDOW, LAYERS = 192, 0.75, 16, (0, 2)


def presses() -> dict[str, Any]:
    """The presses, with the settings that the tests give to our policies too."""

    def snapkv() -> SnapKVPress:
        return SnapKVPress(RATIO, window_size=WINDOW, kernel_size=5)

    return {
        "streamingllm": StreamingLLMPress(RATIO, n_sink=4),
        "knorm": KnormPress(RATIO),
        "keydiff": KeyDiffPress(RATIO),
        "tova": TOVAPress(RATIO),
        "expected": ExpectedAttentionPress(RATIO, n_future_positions=64, epsilon=1e-3),
        "snapkv": snapkv(),
        "adakv": AdaKVPress(snapkv(), alpha_safeguard=0.0),
        "snapkv+criticalkv": CriticalKVPress(snapkv()),
        "adakv+criticalkv": CriticalAdaKVPress(snapkv(), alpha_safeguard=0.0),
    }


def models() -> dict[str, Any]:
    """The reference model, and two tiny random ones."""
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    torch.manual_seed(0)
    models = {
        "llama": AutoModelForCausalLM.from_config(LlamaConfig(**shape)),
        "qwen3": AutoModelForCausalLM.from_config(Qwen3Config(**shape)),
    }
    for model in models.values():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.data.mul_(8)  # sharper than at initialisation: what is kept matters
    models["reference"] = AutoModelForCausalLM.from_pretrained(
        ROOT / "models" / "reference", dtype=torch.float32
    )
    return models


def prompt_of(name: str) -> Tensor:
    """Random tokens, or a question that the reference model can answer."""
    if name != "reference":
        generator = torch.Generator().manual_seed(1)
        return torch.randint(4, 256, (1, NUM_TOKENS), generator=generator)
    sys.path.insert(0, str(ROOT))
    from training.tasks import generate_sample
    from training.tokenizer import ANSWER, BOS, encode

    sample = generate_sample("multikey", NUM_TOKENS - 4, seed=1)
    return torch.tensor([[BOS, *encode(f"{sample.context} {sample.question}".split()), ANSWER]])


def captured(model: Any, ids: Tensor) -> dict[int, dict[str, Any]]:
    """Hidden states, rotated keys, values and position embeddings of every layer."""
    inputs: dict[int, dict[str, Any]] = {}

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs[module.layer_idx] = {"module": module, **kwargs}

    handles = [
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for handle in handles:
        handle.remove()
    for index, layer in inputs.items():
        layer["keys"], layer["values"] = cache.layers[index].keys, cache.layers[index].values
        layer["module"].rotary_emb = model.model.rotary_emb  # as presses do when they are applied
    return inputs


def rotated_queries(layer: dict[str, Any]) -> Tensor:
    """[n, query heads, D] rotated queries."""
    queries = get_prerope_query_states(layer["module"], layer["hidden_states"])
    cos, sin = (part.unsqueeze(1) for part in layer["position_embeddings"])
    return (queries * cos + rotate_half(queries) * sin)[0].transpose(0, 1)


def kept_by(press: Any, layer: dict[str, Any], scores: Tensor) -> Tensor:
    """[H, n] bool: what the press keeps."""
    keys = layer["keys"]
    mask = torch.zeros(keys.shape[1:3], dtype=torch.bool)
    if isinstance(press, AdaKVPress | CriticalAdaKVPress):
        module = layer["module"]
        press.compress(module, layer["hidden_states"], keys, layer["values"], None, layer)
        _, heads, places = module.masked_key_indices
        mask[heads, places] = True
        return ~mask
    # As ScorerPress.compress, which returns keys instead of places.
    top = scores.topk(compute_n_kept(keys.shape[2], RATIO), dim=-1).indices
    return mask.scatter_(1, top, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, model in models().items():
        model.eval()
        layers = captured(model, prompt_of(name))
        tensors: dict[str, Tensor] = {}
        for index in LAYERS:
            store_layer(tensors, index, layers[index])
        save_file(tensors, out / f"{name}.safetensors")
        size = (out / f"{name}.safetensors").stat().st_size
        print(f"{name}: {len(tensors)} tensors, {size / 1e6:.1f} MB")


def store_layer(tensors: dict[str, Tensor], index: int, layer: dict[str, Any]) -> None:
    """One layer's inputs and every press's answer."""
    module, keys, values = layer["module"], layer["keys"], layer["values"]
    tensors[f"{index}.keys"], tensors[f"{index}.values"] = keys[0].clone(), values[0].clone()
    tensors[f"{index}.queries"] = rotated_queries(layer).contiguous()
    cos, sin = (part[0, 1, : keys.shape[3] // 2] for part in layer["position_embeddings"])
    tensors[f"{index}.frequencies"] = torch.atan2(sin, cos)
    tensors[f"{index}.o_proj"] = module.o_proj.weight.detach().clone()
    for press_name, press in presses().items():
        inner = press.press if isinstance(press, AdaKVPress | CriticalAdaKVPress) else press
        scores = inner.score(module, layer["hidden_states"], keys, values, None, layer)[0].float()
        tensors[f"{index}.{press_name}.scores"] = scores.contiguous()
        tensors[f"{index}.{press_name}.kept"] = kept_by(press, layer, scores)


if __name__ == "__main__":
    with torch.no_grad():
        main()
