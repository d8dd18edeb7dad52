"""Keys whose bias is larger than the rest of them, and decoders that store them less their mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests import tiny_models


def build(directory: Path) -> str:
    """Writes a tiny Qwen2 whose keys have a bias, as those of Qwen2.5 do."""

    def add_bias(model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.data
            bias.copy_(12 * torch.randn(bias.shape, generator=generator))

    return str(tiny_models.build("qwen2", directory / "biased", change=add_bias))


def mean_keys(model: str, num_positions: int = 4096) -> list[Tensor]:
    """Returns each layer's [H, 1, D] mean of the bias, rotated to every position."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    cos, sin = loaded.rotary_emb(torch.zeros(1), torch.arange(num_positions)[None])
    means = []
    for layer in loaded.layers:
        heads = layer.self_attn.k_proj.bias.detach().view(-1, cos.shape[-1])
        rows = heads[None, :, None].expand(1, -1, num_positions, -1)
        _, rotated = apply_rotary_pos_emb(rows, rows, cos, sin)
        means.append(rotated[0].mean(1, keepdim=True))
    return means


class LessTheMean:
    """Mixed into a decoder whose `stored` rounds."""

    means: list[Tensor]

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds what is left of keys without their mean, and adds that again."""
        rounded, values = super().stored(layer, keys - self.means[layer], values)  # type: ignore[misc]
        return rounded + self.means[layer], values
