#!/usr/bin/env python
"""Trains the reference model that ships with the repository, and prints how well it answers.

.venv/bin/python scripts/release/train_reference.py --out models/reference --minutes 30
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from training import publish
from training.train import Progress, Recipe, train


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a small Llama on synthetic retrieval tasks in RULER's families, "
        "saves it for vLLM, and prints its accuracy on held-out questions.",
    )
    parser.add_argument("--out", type=Path, default=Path("reference-model"), help="directory")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time")
    parser.add_argument("--max-length", type=int, default=2048, help="longest context, in tokens")
    parser.add_argument("--questions", type=int, default=50, help="held-out, per family and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="torch device, such as cpu or cuda")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    """Trains, saves, evaluates; exit status 1 if the model does not answer well enough."""
    recipe = Recipe(
        minutes=args.minutes, max_length=args.max_length, seed=args.seed, device=args.device
    )
    with tqdm(total=round(60 * args.minutes), unit="s", desc="training") as bar:

        def show(progress: Progress) -> None:
            accuracy = min(progress.accuracy.values(), default=0.0)
            bar.n = min(bar.total, round(progress.seconds))
            bar.set_postfix_str(
                f"{progress.length} tokens, loss {progress.loss:.3f}, worst family {accuracy:.2f}"
            )

        model = train(recipe, show)
    facts = {"minutes": args.minutes, "seed": args.seed, "device": args.device}
    report = publish.publish(model.cpu(), args.out, facts, args.questions)
    for length, scores in report["accuracy"].items():
        row = "  ".join(f"{name} {100 * value:.1f}%" for name, value in scores.items())
        print(f"{length} tokens: {row}")
    reached = report["accuracy"][str(publish.REQUIRED_LENGTH)]["mean"]
    print(f"held-out questions at {publish.REQUIRED_LENGTH} tokens: {100 * reached:.1f}% right")
    return 0 if reached >= publish.REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(run(parse()))
