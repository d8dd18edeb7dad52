"""Prompts hold a needle twice, and a head's score is the attention that it pays to the first."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_kvcompress.compression.needles import (
    CUE_WORDS,
    NEEDLE_WORDS,
    needle_mass,
    needle_prompt,
)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_hold_the_needle_twice(seed: int) -> None:
    prompt = needle_prompt(range(2, 60), [0], 80, seed)
    assert len(prompt.tokens) == 80
    assert prompt.tokens[0] == 0
    needle = prompt.tokens[-NEEDLE_WORDS:]
    assert prompt.tokens[prompt.needle : prompt.needle + NEEDLE_WORDS] == needle
    assert all(prompt.tokens.count(token) == 2 for token in needle)
    assert prompt.tokens[prompt.asked] == needle[CUE_WORDS - 1]


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_scores_are_mean_attention_on_the_needle(
    group: int, softcap: float, with_sinks: bool
) -> None:
    """The last queries are observed, each of which sees no later token."""
    torch.manual_seed(0)
    num_heads, num_tokens, num_queries, size, scale = 2, 30, 6, 8, 0.4
    queries = torch.randn(num_queries, num_heads * group, size)
    keys = torch.randn(num_heads, num_tokens, size)
    needle = slice(9, 18)
    sinks = torch.randn(num_heads, group) if with_sinks else None
    scores = needle_mass(queries, keys, needle, scale, softcap, sinks).tolist()
    for head, score in enumerate(scores):
        masses = []
        for index in range(num_queries):
            weights = []
            for token in range(num_tokens - num_queries + index + 1):
                pairs = zip(queries[index, head], keys[head // group, token], strict=True)
                logit = scale * sum(float(a * b) for a, b in pairs)
                weights.append(math.exp(softcap * math.tanh(logit / softcap) if softcap else logit))
            sink = 0.0 if sinks is None else math.exp(sinks.flatten()[head])
            masses.append(sum(weights[needle]) / (sum(weights) + sink))
        assert score == pytest.approx(sum(masses) / num_queries, abs=1e-5)
