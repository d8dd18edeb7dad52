"""Asks kvpress what `vllm-kvcompress eval` asks: the same questions and texts, as many tokens kept.

    kvpress-env/bin/python scripts/measure/kvpress_eval.py MODEL --tasks text --samples 5 \\
        --seed 0 --out DIR

In the environment of scripts/release/kvpress_golden.py (which says how to make it). Presses have
kvpress's own defaults; of each prompt they keep as many tokens as whole blocks here. Query-
agnostic, and for texts, the press works on the context alone, as in kvpress's pipeline; query-
aware, on context and question; the first token then comes from the prefill's full attention. DIR
takes what `eval` writes, as far as it applies, and a run that was stopped goes on.

With `--beside DIR`, of an `eval` with the same questions, prints for every press what the policy of
that name did beside it, question by question; with `--policy P` too, what P did beside each press.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from vllm_kvcompress.cli.eval import add_questions, items_of  # noqa: E402
from vllm_kvcompress.tools.evaluation.item import Item  # noqa: E402
from vllm_kvcompress.tools.evaluation.metrics import METRICS  # noqa: E402
from vllm_kvcompress.tools.evaluation.prompts import split_prompt  # noqa: E402
from vllm_kvcompress.tools.evaluation.setups import AWARE, FULL, MODES, TEXT  # noqa: E402

Answer = dict[str, Any]
EAGER = ("observed",)  # reads attention weights
ANSWERS = "answers.jsonl"


def presses() -> dict[str, Callable[[float], Any]]:
    """By the names of our policies, where there is one; made of the evicted share."""
    import kvpress as kv

    return {
        "streamingllm": kv.StreamingLLMPress,
        "knorm": kv.KnormPress,
        "keydiff": kv.KeyDiffPress,
        "tova": kv.TOVAPress,
        "snapkv": kv.SnapKVPress,
        "pyramidkv": kv.PyramidKVPress,
        "adakv": lambda ratio: kv.AdaKVPress(kv.SnapKVPress(ratio)),
        "snapkv+criticalkv": lambda ratio: kv.CriticalKVPress(kv.SnapKVPress(ratio)),
        "adakv+criticalkv": lambda ratio: kv.CriticalAdaKVPress(kv.SnapKVPress(ratio)),
        "observed": kv.ObservedAttentionPress,
        "expected": kv.ExpectedAttentionPress,
        "adakv+expected": lambda ratio: kv.AdaKVPress(kv.ExpectedAttentionPress(ratio)),
        "compactor": kv.CompactorPress,
        "kvzip": kv.KVzipPress,
    }


@cache
def load(folder: str, attention: str) -> Any:
    """A model in bfloat16, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


class Asked:
    """A model that answers with a press.

    Attributes:
        model: of transformers, for which the presses were made.
        budget, block_size: what is kept of full blocks, rounded up to whole ones; the last block
            stays, if it is not full.
    """

    def __init__(self, folder: str, name: str, budget: float, block_size: int) -> None:
        self.model = load(folder, "eager" if name in EAGER else "sdpa")
        self.press = None if name == FULL else presses()[name]
        self.budget, self.block_size = budget, block_size

    def num_kept(self, num_tokens: int) -> int:
        """Tokens per head that a prompt keeps."""
        blocks, tail = divmod(num_tokens, self.block_size)
        if self.press is None:
            return num_tokens
        return math.ceil(round(self.budget * blocks, 6)) * self.block_size + tail

    def read(self, tokens: list[int]) -> tuple[Any, Any]:
        """A compressed cache, and the logits of what comes next."""
        from transformers import DynamicCache

        num_kept = self.num_kept(len(tokens))
        cache, press = DynamicCache(), contextlib.nullcontext()
        if num_kept < len(tokens):
            # Presses keep int(n * (1 - ratio)).
            press = self.press(1 - (num_kept + 0.5) / len(tokens))(self.model)
        with press:
            logits = self.model(self._row(tokens), past_key_values=cache).logits
        return cache, logits[0]

    def go_on(self, cache: Any, tokens: list[int], start: int) -> Any:
        """Logits of what follows further tokens; positions go on from the uncompressed length."""
        positions = self._row(range(start, start + len(tokens)))
        return self.model(self._row(tokens), past_key_values=cache, position_ids=positions).logits[
            0
        ]

    def reply(self, context: list[int], question: list[int], most: int) -> list[int]:
        """Greedy token ids; `question` is read after the context was compressed."""
        cache, logits = self.read(context)
        length = len(context)
        if question:
            logits = self.go_on(cache, question, length)
            length += len(question)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        reply: list[int] = []
        while len(reply) < most:
            reply.append(int(logits[-1].argmax()))
            if reply[-1] in ends:
                return reply[:-1]
            logits = self.go_on(cache, reply[-1:], length)
            length += 1
        return reply

    def nats(self, context: list[int], continuation: list[int]) -> float:
        """Per token of the continuation but the first, as `eval` counts."""
        cache, _ = self.read(context)
        logits = self.go_on(cache, continuation, len(context))[:-1].float()
        wanted = self._row(continuation[1:])[0]
        return -float(logits.log_softmax(dim=-1).gather(1, wanted[:, None]).mean())

    def _row(self, numbers: Any) -> Any:
        import torch

        return torch.tensor([list(numbers)], device=self.model.device)


def answer(
    asked: Asked, tokenizer: Any, item: Item, prompt: tuple[list[int], list[int]], mode: str
) -> Answer:
    """Asks one question; the answer as a line of answers.jsonl."""
    context, question = prompt
    record: Answer = {"task": item.task, "length": item.length, "depth": item.depth}
    if mode == TEXT:
        return {**record, "score": None, "nats": asked.nats(context, question)}
    if mode == AWARE:
        context, question = context + question, []
    text = tokenizer.decode(
        asked.reply(context, question, item.max_tokens), skip_special_tokens=True
    )
    score = METRICS[item.metric](text, item.answers)
    return {**record, "score": score, "nats": None, "text": text}


def run(options: argparse.Namespace, items: list[Item]) -> list[Answer]:
    """Asks whatever the folder has no answer to yet; returns all answers."""
    from tqdm import tqdm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = [split_prompt(tokenizer, item) for item in items]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ANSWERS
    answers = read(options.out) if path.exists() else []
    done = {key(answer) for answer in answers}
    setups = [(FULL, 1.0)]
    setups += [(name, budget) for name in options.presses for budget in options.budgets]
    with path.open("a") as output:
        for name, budget in setups:
            setup = FULL if name == FULL else f"{name}@{budget:g}"
            modes = (AWARE,) if name == FULL else MODES[options.mode]
            still_open = [
                (mode, number)
                for number, item in enumerate(items)
                for mode in ((TEXT,) if item.continuation else modes)
                if (setup, mode, number) not in done
            ]
            asked = Asked(options.model, name, budget, options.block_size) if still_open else None
            for mode, number in tqdm(still_open, desc=setup, disable=not still_open):
                record = answer(asked, tokenizer, items[number], prompts[number], mode)
                answers.append({"setup": setup, "mode": mode, "item": number, **record})
                output.write(json.dumps(answers[-1]) + "\n")
                output.flush()
    return answers


def read(folder: Path) -> list[Answer]:
    """Answers of a run of this script, or of `eval`."""
    return [json.loads(line) for line in (folder / ANSWERS).read_text().splitlines()]


def key(answer: Answer) -> tuple[str, str, int]:
    """Setup, mode and number of the question."""
    return answer["setup"], answer["mode"], answer["item"]


def values(answers: list[Answer]) -> dict[tuple[str, str, str, int], float]:
    """By setup, mode, task and number within it: the score, or minus what a text loses, in nats."""
    full = {a["item"]: a["nats"] for a in answers if a["setup"] == FULL}
    first: dict[tuple[str, int], int] = {}
    for record in answers:
        task = record["task"], record["length"]
        first[task] = min(record["item"], first.get(task, record["item"]))
    return {
        (a["setup"], a["mode"], a["task"], a["item"] - first[a["task"], a["length"]]): (
            full[a["item"]] - a["nats"] if a["mode"] == TEXT else a["score"]
        )
        for a in answers
    }


def beside(theirs: list[Answer], ours: list[Answer], policy: str | None = None) -> str:
    """A table of means, with the standard error of the difference, question by question.

    Args:
        theirs, ours: answers of this script, and of `eval`.
        policy: ours that every press is compared with; None: the one of its name.
    """
    kvpress, here = values(theirs), values(ours)
    lines = [
        "| setup | texts | here | kvpress | difference | two standard errors |",
        "|---" * 6 + "|",
    ]
    for setup, mode in dict.fromkeys(at[:2] for at in kvpress):
        own = setup if policy is None else f"{policy}@{setup.partition('@')[2]}"
        pairs = [
            (here[own, *at[1:]], kvpress[at])
            for at in kvpress
            if at[:2] == (setup, mode) and (own, *at[1:]) in here
        ]
        if setup == FULL or len(pairs) < 2:
            continue
        differences = [own_score - score for own_score, score in pairs]
        error = stdev(differences) / math.sqrt(len(pairs))
        means = (fmean(scores) for scores in zip(*pairs, strict=True))
        cells = " | ".join(f"{value:.3f}" for value in (*means, fmean(differences), 2 * error))
        name = setup if mode == TEXT else f"{setup}, {mode}"
        lines.append(f"| `{name}` | {len(pairs)} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    add_questions(parser)
    parser.add_argument("--presses", type=lambda text: text.split(","), help="all")
    parser.add_argument(
        "--budgets", type=lambda text: [float(part) for part in text.split(",")], default=[0.25]
    )
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--block-size", type=int, default=32, help="of `eval` (32)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--policy", metavar="P", help="of DIR, to compare every press with")
    options = parser.parse_args()
    options.presses = options.presses or list(presses())
    answers = run(options, items_of(options))
    ours = [answer for folder in options.beside for answer in read(folder)]
    if ours:
        print(beside(answers, ours, options.policy))


if __name__ == "__main__":
    import torch

    with torch.no_grad():
        main()
