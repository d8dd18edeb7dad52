"""A tiny Ling 2.5: linear attention beside MLA. transformers has no code for it.

Ling is what vLLM calls bailing_hybrid. `LingDecoder` computes it in plain loops, token by token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from tests.tiny_models import COMMON, VOCABULARY

LAYERS, GROUP, HEADS, WIDTH = 4, 2, 2, 128  # the last layer of a group is an MLA layer
LINEAR = 64  # elements of a head of linear attention
LATENT, ROTATED, PLAIN = 512, 64, 32  # elements of a latent row, of a head's queries and values
BASE, EPSILON = 10000.0, 1e-6
INNER = HEADS * LINEAR
CONFIGURATION = """\
from transformers import LlamaConfig


class LingConfig(LlamaConfig):
    model_type = "bailing_hybrid"
"""
# vLLM's operator for CPUs rotates queries of MLA as if of one head, but for this type. A factor of
# one changes nothing.
ROTATION = {
    "rope_type": "deepseek_yarn",
    "rope_theta": BASE,
    "factor": 1.0,
    "original_max_position_embeddings": 8192,
}
CONFIG: dict[str, Any] = {
    **COMMON,
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration.LingConfig"},
    "model_type": "bailing_hybrid",
    "dtype": "float32",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "layer_group_size": GROUP,
    "num_attention_heads": HEADS,
    "head_dim": LINEAR,
    "linear_rope": False,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": PLAIN,
    "num_experts": 0,
    "use_bias": False,
    "use_qkv_bias": False,
    "rms_norm_eps": EPSILON,
    "embedding_dropout": 0.0,
    "rope_parameters": ROTATION,
}


def build(directory: Path) -> Path:
    """Writes a model with random weights, to be loaded with `trust_remote_code`."""
    target = directory / "ling"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    (target / "configuration.py").write_text(CONFIGURATION)
    save_file(random_weights(), target / "model.safetensors")
    return target


def is_linear(layer: int) -> bool:
    """Whether a layer has linear attention."""
    return (layer + 1) % GROUP != 0


def random_weights() -> dict[str, Tensor]:
    """Returns weights with which MLA's attention is sharp."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn((rows, columns), generator=generator) * scale / columns**0.5

    weights = {
        "model.word_embeddings.weight": matrix(VOCABULARY, WIDTH, 8.0),
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": matrix(VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        if is_linear(layer):
            attention = {
                "query_key_value": matrix(3 * INNER, WIDTH),
                "g_proj": matrix(INNER, WIDTH),
                "g_norm": torch.ones(INNER),
                "dense": matrix(WIDTH, INNER, 4.0),
            }
        else:
            attention = {
                "q_proj": matrix(HEADS * (PLAIN + ROTATED), WIDTH, 4.0),
                "kv_a_proj_with_mqa": matrix(LATENT + ROTATED, WIDTH),
                "kv_a_layernorm": torch.ones(LATENT),
                "kv_b_proj": matrix(HEADS * 2 * PLAIN, LATENT, 4.0),
                "o_proj": matrix(WIDTH, HEADS * PLAIN, 4.0),
            }
        parts = {f"attention.{name}": weight for name, weight in attention.items()}
        parts |= {f"mlp.{name}_proj": matrix(WIDTH, WIDTH) for name in ("gate", "up", "down")}
        parts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), torch.ones(WIDTH))
        weights |= {
            f"model.layers.{layer}.{name}.weight": weight.clone() for name, weight in parts.items()
        }
    return weights


def replace_kernel(report: dict[str, Any]) -> None:
    """Computes vLLM's lightning attention of prompts token by token, in the engine's process.

    vLLM's kernel lets a state fade once too few in front of a chunk, so that answers depend on
    where prompts are cut; and it takes half a minute in Triton's interpreter.
    """
    from vllm.model_executor.layers.mamba.linear import minimax_linear_attn

    def attention(
        q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, block_size: int, kv_history: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, state = torch.empty_like(v), kv_history.clone()
        for at in range(q.shape[2]):
            state *= torch.exp(-slopes)
            state += k[:, :, at, :, None] * v[:, :, at, None]
            outputs[:, :, at] = torch.einsum("bhd,bhde->bhe", q[:, :, at], state)
        return outputs, state[:, :, None]

    minimax_linear_attn.lightning_attention = attention


class LingDecoder:
    """A Ling that reads chosen tokens of its context, each projected from its latent row.

    Attributes:
        num_tokens: tokens read so far.
        rows: latent vector and rotated key of what each MLA layer reads.
        logits: [vocabulary] logits behind the last token.
    """

    def __init__(self, model: str, tokens: list[int]) -> None:
        self.weights = self.named(load_file(Path(model) / "model.safetensors"))
        self.num_tokens = 0
        self.rows: dict[int, list[tuple[Tensor, Tensor]]] = {
            layer: [] for layer in range(LAYERS) if not is_linear(layer)
        }
        self.states = torch.zeros(LAYERS, HEADS, LINEAR, LINEAR)
        for token in tokens:
            self.logits = self.step(token)

    def named(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights by the names that this class reads."""
        return weights

    def forget(self, kept: list[list[int]], num_full: int) -> None:
        """Drops the rows of full pages that are not kept; those behind them stay."""
        for rows, places in zip(self.rows.values(), kept, strict=True):
            rows[:num_full] = [rows[at] for at in places]

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Appends a token and returns the logits behind it."""
        hidden = self.weights["model.word_embeddings.weight"][token]
        for layer in range(LAYERS):
            attend = self._attend_linearly if is_linear(layer) else self._attend
            hidden = hidden + attend(layer, self._normed(layer, "input_layernorm", hidden))
            rows = self._normed(layer, "post_attention_layernorm", hidden)
            gate, up = (self._projected(layer, f"mlp.{name}_proj", rows) for name in ("gate", "up"))
            hidden = hidden + self._projected(layer, "mlp.down_proj", silu(gate) * up)
        self.num_tokens += 1
        normed = rms_norm(hidden, (WIDTH,), self.weights["model.norm.weight"], EPSILON)
        return self.weights["lm_head.weight"] @ normed

    def _projected(self, layer: int, name: str, vector: Tensor) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"] @ vector

    def _normed(self, layer: int, name: str, vector: Tensor) -> Tensor:
        weight = self.weights[f"model.layers.{layer}.{name}.weight"]
        return rms_norm(vector, weight.shape, weight, EPSILON)

    def _attend_linearly(self, layer: int, hidden: Tensor) -> Tensor:
        """Lightning attention: states fade from token to token, more slowly in later layers."""
        both = self._projected(layer, "attention.query_key_value", hidden)
        query, key, value = both.view(3, HEADS, LINEAR)
        outputs = []
        for head in range(HEADS):
            slope = 2 ** (-8 * (head + 1) / HEADS) * (1 - layer / (LAYERS - 1) + 1e-5)
            state = self.states[layer, head]
            state *= torch.tensor(-slope).exp()
            state += key[head][:, None] * value[head]
            outputs.append(query[head] * LINEAR**-0.5 @ state)
        normed = self._normed(layer, "attention.g_norm", torch.cat(outputs))
        gate = self._projected(layer, "attention.g_proj", hidden)
        return self._projected(layer, "attention.dense", gate.sigmoid() * normed)

    def _turned(self, vector: Tensor) -> Tensor:
        """Rotates pairs of the [..., 64] elements by the position."""
        angles = self.num_tokens / BASE ** (torch.arange(0, ROTATED, 2) / ROTATED)
        even, odd = vector[..., ::2], vector[..., 1::2]
        turned = torch.empty_like(vector)
        turned[..., ::2] = even * angles.cos() - odd * angles.sin()
        turned[..., 1::2] = odd * angles.cos() + even * angles.sin()
        return turned

    def _attend(self, layer: int, hidden: Tensor) -> Tensor:
        row = self._projected(layer, "attention.kv_a_proj_with_mqa", hidden)
        latent = self._normed(layer, "attention.kv_a_layernorm", row[:LATENT])
        self.rows[layer].append((latent, self._turned(row[LATENT:])))
        queries = self._projected(layer, "attention.q_proj", hidden).view(HEADS, -1)
        weight = self.weights[f"model.layers.{layer}.attention.kv_b_proj.weight"]
        latents, keys = (torch.stack(each) for each in zip(*self.rows[layer], strict=True))
        outputs = []
        for query, projection in zip(queries, weight.view(HEADS, 2 * PLAIN, LATENT), strict=True):
            up_key, up_value = projection[:PLAIN], projection[PLAIN:]
            logits = latents @ up_key.T @ query[:PLAIN] + keys @ self._turned(query[PLAIN:])
            weights = torch.softmax(logits * (PLAIN + ROTATED) ** -0.5, 0)
            outputs.append(up_value @ (weights @ latents))
        return self._projected(layer, "attention.o_proj", torch.cat(outputs))
