"""A small classifier that separates facts of the reference model's tasks from noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForTokenClassification, BertConfig, PreTrainedTokenizerFast

from training.tasks import NOISE, VOCABULARY, generate_sample

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FAMILIES = ("single", "multikey", "multivalue", "multiquery", "tracking")
WORDS = {word: i for i, word in enumerate((*SPECIAL, *VOCABULARY))}
NUM_STEPS = 60


def build_tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", WORDS["[SEP]"]), ("[CLS]", WORDS["[CLS]"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=512,
    )


def train(folder: Path) -> Path:
    """Trains a classifier in seconds, and returns its folder."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model: Any = AutoModelForTokenClassification.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        samples = [generate_sample(family, 96, 7 * step) for family in FAMILIES]
        words = [sample.context.split() for sample in samples]
        ids = torch.tensor([[WORDS[word] for word in row] for row in words])
        labels = torch.tensor([[int(word not in NOISE) for word in row] for row in words])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    target = folder / "needles"
    model.eval().save_pretrained(target)
    build_tokenizer().save_pretrained(target)
    return target
