"""Loss of texts whose prompts an engine reads in part (`--kv-read RULE,prefill=N`).

    python scripts/measure/read_prompts.py models/smollm2 --out engine.log \\
        longcache:global=32,local=64,span=32,top=6,prefill=128

A request is a text, and its last tokens are predicted while it is read. Prints nats per token above
those of stock vLLM, by kind of text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation.engine import Engine, Question
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt

FULL = "full"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("rules", nargs="+", metavar="RULE", help="what --kv-read takes")
    parser.add_argument("--length", type=int, default=1024, help="tokens before them (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="predicted tokens (256)")
    parser.add_argument("--texts", type=int, default=1, help="of each kind (1)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first text (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the engines' log")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    items = load_texts("text", [options.length], options.continuation, options.texts, options.seed)
    questions = [
        Question(*split_prompt(tokenizer, each), 1, False, predicted=True) for each in items
    ]
    longest = options.length + options.continuation + 32
    engine = {"dtype": fast_dtype(), "enforce_eager": True, "max_model_len": longest}
    nats: dict[str, list[float]] = {}
    for rule in (FULL, *options.rules):
        settings = None if rule == FULL else {"policy": "none", "read": rule}
        with Engine(options.model, settings, engine, options.out) as asked:
            replies = [asked.ask(each)[0] for each in questions]
        nats[rule] = [reply.nats or 0.0 for reply in replies]
    kinds = sorted({item.task for item in items})
    print(f"| rule | loss | {' | '.join(kinds)} |")
    print("|---" * (2 + len(kinds)) + "|")
    for rule in options.rules:
        more = [own - full for own, full in zip(nats[rule], nats[FULL], strict=True)]
        by_kind = (
            [loss for item, loss in zip(items, more, strict=True) if item.task == kind]
            for kind in kinds
        )
        cells = [f"{fmean(losses):.3f}" for losses in (more, *by_kind)]
        print(f"| `{rule}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
