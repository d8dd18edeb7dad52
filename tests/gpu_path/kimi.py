"""A tiny Kimi Linear: linear attention with a gate per channel (KDA) beside MLA without rotation.

Sizes are those of the tiny Ling. `KimiDecoder` computes it in plain loops, token by token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize, rms_norm, silu, softplus

from tests.gpu_path import ling
from tests.gpu_path.ling import HEADS, INNER, LATENT, LAYERS, LINEAR, PLAIN, ROTATED, WIDTH
from tests.tiny_models import COMMON

CHECKS = Path(__file__).parents[2] / "scripts" / "checks"
TAPS = 4  # tokens that a convolution sees
EPSILON = 1e-5  # of the norm behind linear attention
NUMBERS = [layer + 1 for layer in range(LAYERS)]
CONFIG: dict[str, Any] = {
    **COMMON,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "float32",
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": LINEAR,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": PLAIN,
    "mla_use_nope": True,
    "num_experts": None,
    "rms_norm_eps": ling.EPSILON,
    "linear_attn_config": {
        "kda_layers": [number for number in NUMBERS if ling.is_linear(number - 1)],
        "full_attn_layers": [number for number in NUMBERS if not ling.is_linear(number - 1)],
        "num_heads": HEADS,
        "head_dim": LINEAR,
        "short_conv_kernel_size": TAPS,
    },
}


def build(directory: Path) -> Path:
    """Writes a model with random weights."""
    target = directory / "kimi"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    save_file(_random_weights(), target / "model.safetensors")
    return target


def _random_weights() -> dict[str, Tensor]:
    """Returns the tiny Ling's weights, but for those of linear attention."""
    weights = {_name(name): weight for name, weight in ling.random_weights().items()}
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn((rows, columns), generator=generator) * scale / columns**0.5

    for layer in filter(ling.is_linear, range(LAYERS)):
        prefix = f"model.layers.{layer}.self_attn."
        weights = {key: value for key, value in weights.items() if not key.startswith(prefix)}
        both = {"f": "f_a_proj f_b_proj", "g": "g_a_proj g_b_proj"}
        for down, up in (names.split() for names in both.values()):
            weights[f"{prefix}{down}.weight"] = matrix(LINEAR, WIDTH)
            weights[f"{prefix}{up}.weight"] = matrix(INNER, LINEAR)
        for name in "qkv":
            weights[f"{prefix}{name}_proj.weight"] = matrix(INNER, WIDTH)
            weights[f"{prefix}{name}_conv1d.weight"] = matrix(INNER, TAPS)[:, None]
        weights[f"{prefix}b_proj.weight"] = matrix(HEADS, WIDTH)
        weights[f"{prefix}A_log"] = torch.linspace(-1, 1, HEADS)
        weights[f"{prefix}dt_bias"] = torch.linspace(-2, 0, INNER)
        weights[f"{prefix}o_norm.weight"] = torch.ones(LINEAR)
        weights[f"{prefix}o_proj.weight"] = matrix(WIDTH, INNER, 4.0)
    return weights


def _name(name: str) -> str:
    """Returns Kimi's name of a weight of Ling's."""
    return name.replace("word_embeddings", "embed_tokens").replace(".attention.", ".self_attn.")


def replace_kernel(report: dict[str, Any]) -> None:
    """Gives the engine's process plain operators, since vLLM's are for NVIDIA's GPUs alone."""
    sys.path.append(str(CHECKS))
    from model_parts import operators

    operators.SINGLE["KimiLinearForCausalLM"]()


class KimiDecoder(ling.LingDecoder):
    """A Kimi Linear that reads chosen tokens of its context."""

    def __init__(self, model: str, tokens: list[int]) -> None:
        self.windows = torch.zeros(LAYERS, 3, TAPS, INNER)
        super().__init__(model, tokens)

    def named(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights by the names that Ling's have."""
        names = {"self_attn": "attention", "embed_tokens": "word_embeddings"}
        for theirs, ours in names.items():
            weights = {name.replace(theirs, ours): value for name, value in weights.items()}
        return weights

    def _turned(self, vector: Tensor) -> Tensor:
        return vector

    def _attend_linearly(self, layer: int, hidden: Tensor) -> Tensor:
        """The delta rule, whose states fade by channel of the keys."""
        prefix = f"model.layers.{layer}.attention."
        rows = []
        for window, name in zip(self.windows[layer], "qkv", strict=True):
            window[:-1] = window[1:].clone()
            window[-1] = self._projected(layer, f"attention.{name}_proj", hidden)
            taps = self.weights[f"{prefix}{name}_conv1d.weight"][:, 0].T
            rows.append(silu((window * taps).sum(0)).view(HEADS, LINEAR))
        gates, output = (
            self._projected(
                layer,
                f"attention.{name}_b_proj",
                self._projected(layer, f"attention.{name}_a_proj", hidden),
            )
            for name in "fg"
        )
        steps = softplus(gates + self.weights[f"{prefix}dt_bias"]).view(HEADS, LINEAR)
        rates = self._projected(layer, "attention.b_proj", hidden).sigmoid()
        outputs = []
        for head, (query, key, value) in enumerate(zip(*rows, strict=True)):
            key, state = normalize(key, dim=0), self.states[layer, head]
            state *= torch.exp(-self.weights[f"{prefix}A_log"][head].exp() * steps[head])[:, None]
            state += rates[head] * key[:, None] * (value - key @ state)
            answer = LINEAR**-0.5 * normalize(query, dim=0) @ state
            normed = rms_norm(answer, (LINEAR,), self.weights[f"{prefix}o_norm.weight"], EPSILON)
            outputs.append(normed * output.view(HEADS, LINEAR)[head].sigmoid())
        return self._projected(layer, "attention.o_proj", torch.cat(outputs))
