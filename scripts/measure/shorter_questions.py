"""Writes the reference model's questions with shortened contexts, for `eval --data`.

    python scripts/measure/shorter_questions.py --rates 0.5,0.25 --lengths 512,1024 --out short/
    vllm-kvcompress eval models/reference --policies full --out results/ --metric contains_all \\
        --max-tokens 16 $(printf -- '--data %s ' short/0.5/*.jsonl)

The questions are those of `eval --tasks words` with the same `--lengths`, `--samples` and `--seed`.
Without `--classifier` a small one is trained first, which tells the facts of these tasks from noise
(tests/prompts/trained.py); it never saw the family `frequent`, nor these questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.prompts.trained import train  # noqa: E402
from vllm_kvcompress.prompts.llmlingua2 import TokenClassifier  # noqa: E402
from vllm_kvcompress.tools.evaluation.item import Item  # noqa: E402
from vllm_kvcompress.tools.evaluation.items import WORDS, generate  # noqa: E402


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def rows(items: list[Item], classifier: TokenClassifier, rate: float) -> Iterator[dict[str, Any]]:
    """Questions as `eval --data` reads them, and the part of the context's tokens that stayed."""
    for item in items:
        scored = classifier.score(item.context)
        context, num_kept = scored.shortened(item.context, rate)
        yield {
            "context": context,
            "question": item.question,
            "answers": item.answers,
            "kept": num_kept / scored.num_tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=numbers, default=[0.5], metavar="R,...")
    parser.add_argument("--lengths", type=numbers, default=[1024], metavar="N,...", help="words")
    parser.add_argument("--samples", type=int, default=10, help="per family and length (10)")
    parser.add_argument("--seed", type=int, default=2_000_000, help="of the questions (2000000)")
    parser.add_argument("--classifier", metavar="MODEL", help="as --prompt-compressor names one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    items = generate(WORDS, [int(n) for n in options.lengths], options.samples, options.seed)
    families = dict.fromkeys(item.task for item in items)
    with tempfile.TemporaryDirectory() as folder:
        classifier = TokenClassifier(options.classifier or str(train(Path(folder))))
    for rate in options.rates:
        target = options.out / f"{rate:g}"
        target.mkdir(parents=True, exist_ok=True)
        kept = []
        for family in families:
            family_rows = list(rows([i for i in items if i.task == family], classifier, rate))
            kept += [row["kept"] for row in family_rows]
            path = target / f"{family.partition('/')[2]}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in family_rows))
        print(f"{target}: {len(kept)} questions, {sum(kept) / len(kept):.1%} of their contexts")


if __name__ == "__main__":
    main()
