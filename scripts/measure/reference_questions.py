"""Writes questions that the reference model can answer, for `eval --data`.

    python scripts/measure/reference_questions.py --lengths 512,1024 --samples 10 --out questions/
    vllm-kvcompress eval models/reference --out results/ \\
        $(printf -- '--data %s ' questions/*.jsonl)

A word-level variant of RULER's families (`scripts/release/training/tasks.py`), one file per family
and length. With `--rates 0.5,0.25` the contexts are shortened to these shares, a folder for each,
as `--prompt-compressor` shortens chats. Without `--classifier` a small one is trained first, which
tells the facts of these tasks from noise (tests/prompts/trained.py); it never saw the family
`frequent`, nor these questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "release")]

from training.tasks import FAMILIES, generate_sample  # noqa: E402
from vllm_kvcompress.prompts.llmlingua2 import TokenClassifier  # noqa: E402

SEED = 2_000_000


def rows(family: str, length: int, samples: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Yields questions of a family behind `length` words, as `eval --data` reads them."""
    for number in range(samples):
        sample = generate_sample(family, length, seed + number)
        yield {
            "context": sample.context,
            "question": sample.question,
            "answers": sample.answers,
            "metric": "contains_all",
            "max_tokens": 16,
        }


def shortened(row: dict[str, Any], classifier: TokenClassifier, rate: float) -> dict[str, Any]:
    """Returns a question with a shorter context, and the share of its tokens that is `kept`."""
    scored = classifier.score(row["context"])
    context, num_kept = scored.shortened(row["context"], rate)
    return row | {"context": context, "kept": num_kept / scored.num_tokens}


def write(folder: Path, questions: dict[str, list[dict[str, Any]]]) -> None:
    """Writes one file per family and length."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in questions.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def parse() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=listed, default=FAMILIES, metavar="F,...")
    parser.add_argument("--lengths", type=listed, default=["1024"], metavar="N,...", help="words")
    parser.add_argument("--samples", type=int, default=10, help="per family and length (10)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the questions (2000000)")
    parser.add_argument("--rates", type=listed, default=[], metavar="R,...", help="of contexts")
    parser.add_argument("--classifier", metavar="MODEL", help="as --prompt-compressor names one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    return parser.parse_args()


def main() -> None:
    options = parse()
    questions = {
        f"{family}@{length}": list(rows(family, int(length), options.samples, options.seed))
        for family, length in product(options.families, options.lengths)
    }
    num_all = sum(map(len, questions.values()))
    if not options.rates:
        write(options.out, questions)
        print(f"{options.out}: {num_all} questions")
        return
    if options.classifier is None:
        from tests.prompts.trained import train

        with tempfile.TemporaryDirectory() as folder:
            classifier = TokenClassifier(str(train(Path(folder))))
    else:
        classifier = TokenClassifier(options.classifier)
    for rate in map(float, options.rates):
        short = {
            name: [shortened(line, classifier, rate) for line in lines]
            for name, lines in questions.items()
        }
        target = options.out / f"{rate:g}"
        write(target, short)
        kept = sum(line["kept"] for lines in short.values() for line in lines) / num_all
        print(f"{target}: {num_all} questions, {kept:.1%} of their contexts")


if __name__ == "__main__":
    main()
