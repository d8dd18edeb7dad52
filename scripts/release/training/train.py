"""Trains the reference model: copying first, then recall, over contexts that double in length.

Loss is on answers only. Every context is asked many questions in the chat's layout (`question
<answer> reply <eos>`), so that one step teaches much.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.initialise import ROPE_THETA, plant_induction
from training.tasks import FAMILIES, generate_scene
from training.tokenizer import ANSWER, BOS, EOS, SPECIAL, WORDS, encode
from vllm_kvcompress.tools.dtypes import emulates_bfloat16

IGNORED = -100
MAX_QUESTIONS = 24
RECALL = tuple(family for family in FAMILIES if family != "frequent")


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        minutes: time limit.
        max_steps: of the optimizer; None: as many as the time allows.
        max_length, first_length: context tokens of the last and of the first stage.
        tokens_per_step: tokens of a batch.
        learning_rate: peak, after 100 steps of warm-up; falls to a tenth in the last fifth.
        promote_at: accuracy of answer tokens, in every recall family, at which contexts double.
        seed: of data and weights.
        device: torch device.
    """

    minutes: float = 30.0
    max_steps: int | None = None
    max_length: int = 2048
    first_length: int = 64
    tokens_per_step: int = 4096
    learning_rate: float = 1e-3
    promote_at: float = 0.95
    seed: int = 0
    device: str = "cpu"


@dataclass
class Progress:
    """The state of the training, passed to the caller after every step."""

    step: int = 0
    length: int = 0
    loss: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def build_model() -> Any:
    """Builds a Llama with 4 layers of width 128, and 8 query and 4 KV heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,  # what is copied is what is said
        initializer_range=0.05,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    plant_induction(model, seed=0)
    return model


def recall_sequence(family: str, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Ids and labels of one context and many questions about it."""
    if family == "frequent":
        length = max(length, 128)  # shares mean nothing in a few words
    scene = generate_scene(family, rng.randint(length // 2, length), rng)
    ids = [BOS, *encode(scene.words)]
    labels = [IGNORED] * len(ids)
    asked = rng.sample(scene.questions, min(MAX_QUESTIONS, len(scene.questions)))
    for question, answer in asked:
        prefix = [*encode(question), ANSWER]
        reply = [*encode(answer), EOS]
        ids += prefix + reply
        labels += [IGNORED] * len(prefix) + reply
    return ids, labels


def copy_sequence(length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Short segments of words that occur nowhere else, repeated at random distances.

    Loss is on the repeats except their first words, which nothing announces.
    """
    unused = list(range(len(SPECIAL), len(WORDS)))
    rng.shuffle(unused)
    ids, labels = [BOS], [IGNORED]
    segments: list[list[int]] = []
    while len(ids) < length:
        if segments and (rng.random() < 0.6 or len(unused) < 8):
            segment = rng.choice(segments)
            ids += segment
            labels += [IGNORED, *segment[1:]]
        else:
            segment = [unused.pop() for _ in range(rng.randint(3, 8))]
            segments.append(segment)
            ids += segment
            labels += [IGNORED] * len(segment)
    return ids, labels


def make_batch(
    length: int,
    copying: float,
    recipe: Recipe,
    rng: random.Random,
    accuracy: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Tensor, Tensor, list[str]]:
    """Ids and labels [B, T], padded, and each row's family ("copy" for copying).

    Families that are answered badly are drawn more often.
    """
    weights = [max(0.1, 1.05 - accuracy.get(family, 0.0)) for family in FAMILIES]
    rows, families = [], []
    for _ in range(max(4, recipe.tokens_per_step // (length + 120))):
        if rng.random() < copying:
            rows.append(copy_sequence(max(64, length), rng))
            families.append("copy")
        else:
            (family,) = rng.choices(FAMILIES, weights)
            rows.append(recall_sequence(family, length, rng))
            families.append(family)
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORED)
    for i, (row, row_labels) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.tensor(row_labels)
    return ids, labels, families


def answer_loss(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss over answer tokens, and the share of each row [B] that is right.

    Rows weigh alike, so families with one short answer count as much as those with many long ones.
    """
    hidden = model.model(ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    wanted = targets != IGNORED
    logits = model.lm_head(hidden[wanted]).float()
    per_row = wanted.sum(1).clamp_min(1)
    losses = functional.cross_entropy(logits, targets[wanted], reduction="none")
    loss = (losses / per_row[wanted.nonzero()[:, 0]]).sum() / len(ids)
    right = torch.zeros_like(targets, dtype=torch.float32)
    right[wanted] = (logits.argmax(1) == targets[wanted]).float()
    return loss, right.sum(1) / per_row


def train(recipe: Recipe, on_step: Callable[[Progress], None] = lambda progress: None) -> Any:
    """Trains until the time is up, and calls `on_step` after every step.

    Contexts double when the slowest recall family keeps up. Returns the model in evaluation mode.
    """
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    model = build_model().to(recipe.device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    progress = Progress(length=recipe.first_length)
    started = time.monotonic()
    steps_at_length = 0
    steps = itertools.count() if recipe.max_steps is None else range(recipe.max_steps)
    for _ in steps:
        if progress.seconds >= 60 * recipe.minutes:
            break
        copying = 0.3 if progress.length < 128 else 0.05
        length = _some_length(progress, rng)
        ids, labels, families = make_batch(length, copying, recipe, rng, progress.accuracy)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(recipe, progress)
        # Half precision pays only where attention is long, and the machine has it.
        emulated = recipe.device == "cpu" and emulates_bfloat16()
        half = progress.length >= 512 and not emulated
        with torch.autocast(recipe.device, dtype=torch.bfloat16, enabled=half):
            loss, right = answer_loss(model, ids.to(recipe.device), labels.to(recipe.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for family, share in zip(families, right.tolist(), strict=True):
            before = progress.accuracy.get(family, 0.0)
            progress.accuracy[family] = 0.9 * before + 0.1 * share
        progress.step += 1
        progress.loss = float(loss.detach())
        progress.seconds = time.monotonic() - started
        steps_at_length += 1
        recall = [progress.accuracy.get(family, 0.0) for family in RECALL]
        ready = min(recall) >= recipe.promote_at and steps_at_length >= 20
        if ready and progress.length < recipe.max_length:
            progress.length *= 2
            steps_at_length = 0
        on_step(progress)
    return model.eval()


def _some_length(progress: Progress, rng: random.Random) -> int:
    """Mostly the current length; sometimes a shorter one, so that it is not forgotten."""
    shorter = max(64, progress.length // 4)
    return progress.length if rng.random() < 0.8 else shorter


def _learning_rate(recipe: Recipe, progress: Progress) -> float:
    warm = min(1.0, (progress.step + 1) / 100)
    spent = progress.seconds / (60 * recipe.minutes)
    fall = 1.0 if spent < 0.8 else max(0.1, 1.0 - 4.5 * (spent - 0.8))
    return recipe.learning_rate * warm * fall
