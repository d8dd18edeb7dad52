"""The shipped reference model, its tokenizer, and its training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from training.evaluate import HELD_OUT_SEED, evaluate, prompt_ids
from training.tasks import FAMILIES, generate_sample
from training.tokenizer import BOS, build_tokenizer
from training.train import (
    IGNORED,
    Recipe,
    answer_loss,
    build_model,
    make_batch,
    recall_sequence,
    train,
)
from vllm_kvcompress.tools.dtypes import fast_dtype

STEPS = 20  # the loss falls by 0.9 in these, however slow the machine is
SHIPPED = Path(__file__).parents[2] / "models" / "reference"


@pytest.fixture(scope="module")
def shipped() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=fast_dtype()).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED)


def test_shipped_model_answers_held_out_questions(shipped: Any) -> None:
    """Ten questions of each family with contexts of 1,024 tokens; at least 95% right."""
    scores = evaluate(shipped, num_tokens=1024, num_samples=10)
    assert scores["mean"] >= 0.95, scores


def test_the_recorded_accuracy_meets_the_requirement() -> None:
    report = json.loads((SHIPPED / "reference.json").read_text())
    assert report["accuracy"]["1024"]["mean"] >= 0.95
    weights = sum(f.stat().st_size for f in SHIPPED.iterdir())
    assert weights < 20e6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_renders_to_the_training_layout(tokenizer: Any, family: str) -> None:
    sample = generate_sample(family, 128, HELD_OUT_SEED)
    messages = [{"role": "user", "content": f"{sample.context}\n{sample.question}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == prompt_ids(sample)
    assert prompt_ids(sample)[0] == BOS


def test_words_survive_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    text = "find k3 k5 . v7 w31 n15 f0 x63"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == text
    assert tokenizer("unheard-of")["input_ids"] == [tokenizer.unk_token_id]


def test_loss_covers_answers_only() -> None:
    """Every label is the token at its place; contexts and questions have none."""
    ids, labels = recall_sequence("multikey", 128, random.Random(1))
    words = build_tokenizer().convert_ids_to_tokens(ids)
    labelled = [word for word, label in zip(words, labels, strict=True) if label != IGNORED]
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    assert set(word[0] for word in labelled) <= set("kvw<")
    first_question = words.index("find")
    assert all(label == IGNORED for label in labels[: first_question + 3])


def test_a_few_steps_reduce_the_loss() -> None:
    recipe = Recipe(minutes=4, max_steps=STEPS, tokens_per_step=1024)
    ids, labels, _ = make_batch(64, 0.0, recipe, random.Random(5))
    torch.manual_seed(0)
    trained = train(recipe)
    with torch.no_grad():
        before, _ = answer_loss(build_model(), ids, labels)
        after, _ = answer_loss(trained, ids, labels)
    assert float(after) < float(before) - 0.2
