"""A warm start: the first two layers begin as an induction circuit, which training then refines.

From random weights, attention to what followed the same word before takes most of the training to
appear. Here the heads of layer 0 attend to the previous word and write it into a rotated copy of
the embedding space; those of layer 1 attend to words whose previous word is the current one, and
copy them. Everything else starts random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROPE_THETA = 1e6  # slow: most rotary pairs turn little within a context
PREVIOUS_GAIN = 8.0
MATCH_GAIN = 3.0
QUIET = 0.05  # everything else starts as a murmur
SAY_GAIN = 3.0


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def plant_induction(model: Any, seed: int) -> None:
    """Sets embeddings and the first two attention layers of a Llama in place.

    Its KV heads together have to be as wide as the model; `seed` is that of the random bases.
    """
    config = model.config
    width, size = config.hidden_size, config.head_dim
    num_kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // num_kv_heads
    generator = torch.Generator().manual_seed(seed)
    basis, noted = _orthogonal(width, generator), _orthogonal(width, generator)
    half = size // 2
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        loudness = float(embedding.std())  # values are normalised, the residual stream is not
        embedding[:] = loudness * torch.nn.functional.normalize(embedding, dim=1) * width**0.5
        embedding[:, 0] = 3 * loudness  # the same for every word: "I am a word"
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(QUIET)
            layer.mlp.down_proj.weight.mul_(QUIET)
        first, second = (layer.self_attn for layer in model.model.layers[:2])
        for head in range(num_kv_heads):
            keys = slice(head * size, (head + 1) * size)
            queries = slice(head * group * size, (head * group + 1) * size)
            part = basis[keys]
            # Layer 0: in the fast rotary pairs scores peak one place back, since keys carry a
            # phase of one step.
            first.q_proj.weight[queries] = 0
            first.k_proj.weight[keys] = 0
            fast = torch.arange(half) < 4
            first.q_proj.weight[queries][:half, 0] = PREVIOUS_GAIN * fast
            first.k_proj.weight[keys][:half, 0] = torch.cos(frequencies)
            first.k_proj.weight[keys][half:, 0] = torch.sin(frequencies)
            first.v_proj.weight[keys] = part
            first.o_proj.weight[:, queries] = loudness * noted[:, keys]
            # Layer 1: "my word" meets "the word before you", in the slow rotary pairs only.
            slow = torch.arange(size) % half >= half // 2
            second.q_proj.weight[queries] = MATCH_GAIN * part * slow[:, None]
            second.k_proj.weight[keys] = MATCH_GAIN * (noted[:, keys].t()) * slow[:, None]
            second.v_proj.weight[keys] = part
            second.o_proj.weight[:, queries] = SAY_GAIN * loudness * part.t()
