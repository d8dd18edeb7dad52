"""Measures how often the reference model answers held-out questions, with the full cache."""

from __future__ import annotations

from typing import Any

import torch

from training.tasks import FAMILIES, Sample, generate_sample
from training.tokenizer import ANSWER, BOS, EOS, PAD, WORDS, encode
from vllm_kvcompress.tools.evaluation.metrics import contains_all

HELD_OUT_SEED = 1_000_000  # training draws its scenes from another generator altogether


def prompt_ids(sample: Sample) -> list[int]:
    """Token ids of a sample, as the chat template renders it."""
    words = f"{sample.context} {sample.question}".split()
    return [BOS, *encode(words), ANSWER]


def answer(model: Any, sample: Sample, max_tokens: int = 16) -> str:
    """The model's greedy reply, as words."""
    ids = torch.tensor([prompt_ids(sample)], device=model.device)
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    reply = output[0, ids.shape[1] :].tolist()
    return " ".join(WORDS[token] for token in reply if token != EOS)


def evaluate(model: Any, num_tokens: int, num_samples: int) -> dict[str, float]:
    """Mean score in [0, 1] by family on held-out questions, and under "mean" over the families.

    `num_tokens` is the number of words of each context, `num_samples` of questions per family.
    """
    scores = {}
    for family in FAMILIES:
        samples = [
            generate_sample(family, num_tokens, HELD_OUT_SEED + seed) for seed in range(num_samples)
        ]
        scores[family] = (
            sum(contains_all(answer(model, s), s.answers) for s in samples) / num_samples
        )
    scores["mean"] = sum(scores[family] for family in FAMILIES) / len(FAMILIES)
    return scores
