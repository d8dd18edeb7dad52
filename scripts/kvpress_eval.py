"""Asks kvpress the questions of `vllm-kvcompress eval --tasks words`, on the reference model.

    kvpress-env/bin/python scripts/kvpress_eval.py --out FILE.json

In the environment of scripts/kvpress_golden.py (which says how to make it). Presses have kvpress's
own defaults. Query-agnostic, the press works on the context alone, as in kvpress's pipeline;
query-aware, on context and question; the first token then comes from the prefill's full attention.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    KeyDiffPress,
    KnormPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from vllm_kvcompress.tools.evaluation.items import Item, generate  # noqa: E402
from vllm_kvcompress.tools.evaluation.metrics import METRICS  # noqa: E402
from vllm_kvcompress.tools.evaluation.prompts import split_prompt  # noqa: E402
from vllm_kvcompress.tools.evaluation.setups import AGNOSTIC, AWARE  # noqa: E402

PRESSES: dict[str, Callable[[float], Any]] = {
    "streamingllm": StreamingLLMPress,
    "knorm": KnormPress,
    "keydiff": KeyDiffPress,
    "tova": TOVAPress,
    "snapkv": SnapKVPress,
    "pyramidkv": PyramidKVPress,
    "adakv": lambda ratio: AdaKVPress(SnapKVPress(ratio)),
    "snapkv+criticalkv": lambda ratio: CriticalKVPress(SnapKVPress(ratio)),
    "adakv+criticalkv": lambda ratio: CriticalAdaKVPress(SnapKVPress(ratio)),
}
SEED = 2_000_000  # of `vllm-kvcompress eval`


def answer(
    model: Any, press: Any, prompt: tuple[list[int], list[int]], mode: str, most: int
) -> Any:
    """Greedy reply token ids."""
    context, question = (torch.tensor([part]) for part in prompt)
    if mode == AWARE:
        context, question = torch.cat([context, question], dim=1), question[:, :0]
    cache, length = DynamicCache(), context.shape[1]
    with press(model) if press is not None else contextlib.nullcontext():
        logits = model(context, past_key_values=cache).logits
    if question.shape[1]:
        logits = _step(model, cache, question, length)
        length += question.shape[1]
    reply: list[int] = []
    while len(reply) < most:
        reply.append(int(logits[0, -1].argmax()))
        if reply[-1] == model.config.eos_token_id:
            return reply[:-1]
        logits = _step(model, cache, torch.tensor([reply[-1:]]), length)
        length += 1
    return reply


def _step(model: Any, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Positions go on from the uncompressed length, as in kvpress."""
    positions = torch.arange(start, start + ids.shape[1])[None]
    return model(ids, past_key_values=cache, position_ids=positions).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = ROOT / "models" / "reference"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    items: list[Item] = generate("words", [512, 1024], options.samples, SEED)
    prompts = [split_prompt(tokenizer, item) for item in items]
    rows = []
    runs = [("full", AWARE), *((name, mode) for name in PRESSES for mode in (AWARE, AGNOSTIC))]
    for name, mode in tqdm(runs, unit="setting"):
        press = PRESSES[name](1 - options.budget) if name != "full" else None
        tasks = defaultdict(list)
        for item, prompt in zip(items, prompts, strict=True):
            reply = tokenizer.decode(answer(model, press, prompt, mode, item.max_tokens))
            score = METRICS[item.metric](reply, item.answers)
            tasks[f"{item.task}@{item.length}"].append(score)
        means = {task: fmean(scores) for task, scores in tasks.items()}
        rows.append({"setup": name, "mode": mode, "score": fmean(means.values()), "tasks": means})
    options.out.write_text(json.dumps({"budget": options.budget, "rows": rows}, indent=2) + "\n")
    for row in rows:
        print(f"{row['setup']:20}{row['mode']:16}{100 * row['score']:6.1f}%")


if __name__ == "__main__":
    with torch.no_grad():
        main()
