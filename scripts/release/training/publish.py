"""Writes a trained reference model as a directory that vLLM and Hugging Face load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from training.evaluate import HELD_OUT_SEED, evaluate
from training.tokenizer import build_tokenizer

LENGTHS = (256, 512, 1024, 2048)
REQUIRED_LENGTH = 1024
REQUIRED_ACCURACY = 0.95


def publish(model: Any, directory: Path, facts: dict[str, Any], num_samples: int) -> dict[str, Any]:
    """Saves weights, tokenizer and the accuracy of the saved weights.

    Args:
        model: the trained model; converted to bfloat16 in place.
        directory: where to write.
        facts: how it was trained, for `reference.json`.
        num_samples: held-out questions per family and length.

    Returns:
        The contents of `reference.json`.
    """
    model.to(torch.bfloat16)
    model.config.use_cache = True
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    report = {
        **facts,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "held_out_seed": HELD_OUT_SEED,
        "questions_per_family": num_samples,
        "accuracy": {
            str(length): {
                name: round(value, 4)
                for name, value in evaluate(model, length, num_samples).items()
            }
            for length in LENGTHS
        },
    }
    (directory / "reference.json").write_text(json.dumps(report, indent=2) + "\n")
    return report
