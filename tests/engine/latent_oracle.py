"""A tiny DeepSeek V2 in plain loops, which reads the latent rows that an engine says it kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

BLOCK, NUM_LAYERS, RANK = 16, 3, 512


class LatentDecoder:
    """A DeepSeek V2 that reads chosen tokens of its context, each projected from its latent row.

    Args:
        model: directory of the model.
        context: token ids, which are read densely.
        kept: kept[layer] = positions, among the first `num_full` tokens, that stay.
        num_full: tokens of the context's full blocks; those behind them always stay.
    """

    def __init__(
        self, model: str, context: list[int], kept: list[list[int]], num_full: int
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.num_tokens, inputs = len(context), list[Tensor]()
        for layer in self.model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, __, given: inputs.append(given["hidden_states"][0]), with_kwargs=True
            )
        with torch.no_grad():
            self.first_logits = self.model(torch.tensor([context])).logits[0, -1]
            rows = [self.rows_of(layer, hidden, 0) for layer, hidden in enumerate(inputs)]
        stay = range(num_full, len(context))
        self.rows = [[of_layer[at] for at in (*kept[i], *stay)] for i, of_layer in enumerate(rows)]

    def turned(self, vectors: Tensor, first: int) -> Tensor:
        """Rotates [tokens, ..., 64] by their positions, the first of which is given."""
        rotary, turned = self.model.model.rotary_emb, torch.empty_like(vectors)
        for number, vector in enumerate(vectors):
            angles = (first + number) * rotary.inv_freq
            cos, sin = (f(angles) * rotary.attention_scaling for f in (torch.cos, torch.sin))
            even, odd = vector[..., ::2], vector[..., 1::2]
            turned[number, ..., ::2] = even * cos - odd * sin
            turned[number, ..., 1::2] = odd * cos + even * sin
        return turned

    def rows_of(self, layer: int, hidden: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
        """Returns latent vector and rotated key of tokens."""
        attention = self.model.model.layers[layer].self_attn
        both = attention.kv_a_proj_with_mqa(hidden)
        latents, keys = attention.kv_a_layernorm(both[:, :RANK]), self.turned(both[:, RANK:], first)
        return list(zip(latents, keys, strict=True))

    def forget(self, kept: list[list[int]]) -> None:
        """Drops rows of full blocks that are not kept; a partial block stays."""
        for layer, places in enumerate(kept):
            rows = self.rows[layer]
            self.rows[layer] = [*(rows[at] for at in places), *rows[len(rows) // BLOCK * BLOCK :]]

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Appends a token and returns the logits after it, [vocabulary]."""
        inner = self.model.model
        hidden = inner.embed_tokens(torch.tensor([token]))
        for number, layer in enumerate(inner.layers):
            hidden = hidden + self._attend(number, layer.self_attn, layer.input_layernorm(hidden))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.num_tokens += 1
        return self.model.lm_head(inner.norm(hidden))[0]

    def _attend(self, number: int, attention: Any, hidden: Tensor) -> Tensor:
        self.rows[number] += self.rows_of(number, hidden, self.num_tokens)
        heads, nope = attention.num_heads, attention.qk_nope_head_dim
        queries = attention.q_proj(hidden).view(heads, -1)
        rotated = self.turned(queries[None, :, nope:], self.num_tokens)[0]
        projections = attention.kv_b_proj.weight.view(heads, -1, RANK)
        outputs = []
        for head in range(heads):
            up_key, up_value = projections[head, :nope], projections[head, nope:]
            rows = self.seen(number, head)
            keys = [torch.cat((up_key @ latent, key)) for latent, key in rows]
            query = torch.cat((queries[head, :nope], rotated[head]))
            logits = torch.stack([query @ key for key in keys]) * attention.scaling
            values = torch.stack([up_value @ latent for latent, _ in rows])
            outputs.append(torch.softmax(logits, 0) @ values)
        return attention.o_proj(torch.cat(outputs)[None])

    def seen(self, layer: int, head: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the rows that a query head attends to: all."""
        return self.rows[layer]


def attentions(model: str, tokens: list[int]) -> tuple[Tensor, ...]:
    """Returns each layer's [1, heads, queries, tokens] attention."""
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        given: tuple[Tensor, ...]
        given = reference(torch.tensor([tokens]), output_attentions=True).attentions
    return given


def check_logits(logits: Tensor, logprobs: dict[str, float], where: Any) -> None:
    """Asserts that the engine's log-probabilities of a token are those of some logits."""
    expected = torch.log_softmax(logits, dim=-1)
    for token, found in logprobs.items():
        assert found == pytest.approx(float(expected[int(token)]), abs=2e-4), where


def records(report: dict[str, Any], event: int) -> list[list[int]]:
    """Returns what each layer keeps at one of the events of requests that are alone."""
    part = report["kept"][event * NUM_LAYERS :][:NUM_LAYERS]
    assert [record["layer"] for record in part] == list(range(NUM_LAYERS))
    return [record["kept"] for record in part]


def check_decoding(
    decoder: LatentDecoder, report: dict[str, Any], name: str, events: dict[int, list[list[int]]]
) -> None:
    """Asserts that a request reads what a decoder does; `events` by position, with what each keeps.

    A token is computed before the event at its end.
    """
    output, prompt = report["outputs"][name], report["prompts"][name]
    tokens, first = [*prompt, *output["tokens"]], decoder.num_tokens
    for at in range(first, len(tokens) - 1):
        logits = decoder.step(tokens[at])
        if at + 1 >= len(prompt):
            number = at + 1 - len(prompt)
            check_logits(logits, output["logprobs"][number], (name, number))
        if (kept := events.get(at + 1)) is not None:
            decoder.forget(kept)
