"""Asks kvpress what `vllm-kvcompress eval` asks: the same questions and texts, as many tokens kept.

    kvpress-env/bin/python scripts/measure/kvpress_eval.py MODEL --tasks text --samples 5 \\
        --seed 0 --out DIR

In the environment of scripts/release/kvpress_golden.py (which says how to make it). Presses have
kvpress's own defaults; of each prompt they keep as many tokens as whole blocks here. Query-
agnostic, and for texts, the press works on the context alone, as in kvpress's pipeline; query-
aware, on context and question; the first token then comes from the prefill's full attention. A
prompt is read once for all presses and budgets: their hooks are called with what the layers were.
DIR takes what `eval` writes, as far as it applies, and a run that was stopped goes on.

With `--beside DIR`, of an `eval` with the same questions, prints and writes to beside.json for
every press what the policy of that name did beside it, question by question; with `--policy P` too,
what P did beside each press (`auto`: with measured heads).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from vllm_kvcompress.cli.eval import add_questions, items_of  # noqa: E402
from vllm_kvcompress.config.auto import named_policy  # noqa: E402
from vllm_kvcompress.tools.evaluation.item import Item  # noqa: E402
from vllm_kvcompress.tools.evaluation.metrics import METRICS  # noqa: E402
from vllm_kvcompress.tools.evaluation.prompts import split_prompt  # noqa: E402
from vllm_kvcompress.tools.evaluation.setups import AWARE, FULL, MODES, TEXT  # noqa: E402

Answer = dict[str, Any]
EAGER = ("observed",)  # reads attention weights
ANSWERS, BESIDE = "answers.jsonl", "beside.json"


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
        "kvzip": kvzip,
    }


def kvzip(ratio: float) -> Any:
    """KVzip whose scores, which no budget changes, may be used again."""
    import kvpress as kv

    class ScoredOnce(kv.KVzipPress):
        scores = None

        def compress_prompt(self, model: Any, prompt: Any, kv_cache: Any) -> None:
            """Masks what is evicted of `kv_cache`, which holds `prompt`, a row of ids."""
            if self.scores is None:
                with self(model):  # has the prompt repeated at the end
                    self._context_ids, self._cache = prompt, kv_cache
            else:
                self.score_val = self.scores
                super().compress_post(model)

        def compress_post(self, model: Any) -> None:
            self.scores = self.score_val
            super().compress_post(model)

    return ScoredOnce(ratio)


@cache
def load(folder: str, attention: str) -> Any:
    """A model in bfloat16, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    )
    if not hasattr(model.config, "head_dim"):  # Qwen2's, which kvpress's CriticalKV reads
        model.config.head_dim = model.model.layers[0].self_attn.head_dim
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


class Prefill:
    """A prompt that the model has read, for any number of presses.

    Attributes:
        cache: of all tokens; presses get copies.
        logits: [1, vocabulary] of what comes next.
        calls: of every attention layer: the module, its keyword arguments and its output.
    """

    def __init__(self, model: Any, tokens: tuple[int, ...]) -> None:
        from transformers import DynamicCache

        self.model, self.prompt = model, ids_row(model, tokens)
        self.cache, self.calls = DynamicCache(), []
        self._kvzip_scores = None
        handles = [
            layer.self_attn.register_forward_hook(self._record, with_kwargs=True)
            for layer in model.model.layers
        ]
        self.logits = model(self.prompt, past_key_values=self.cache, logits_to_keep=1).logits[0]
        for handle in handles:
            handle.remove()

    def _record(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.calls.append((module, kwargs, output))

    def compressed(self, press: Any | None) -> Any:
        """A copy of the cache as a press leaves it; masks go to the modules, as in kvpress."""
        kv_cache = copy.deepcopy(self.cache)
        for module, _, _ in self.calls:
            module.masked_key_indices = None
        if hasattr(press, "compress_prompt"):
            press.scores = self._kvzip_scores
            press.compress_prompt(self.model, self.prompt, kv_cache)
            self._kvzip_scores = press.scores
        elif press is not None:
            with press(self.model):  # gives the modules what presses read of them
                pass
            for module, kwargs, output in self.calls:
                press.forward_hook(module, [], {**kwargs, "past_key_values": kv_cache}, output)
        return kv_cache


@lru_cache(maxsize=2)
def prefill(folder: str, attention: str, tokens: tuple[int, ...]) -> Prefill:
    """The last prompt, read with each of both kinds of attention."""
    return Prefill(load(folder, attention), tokens)


def ids_row(model: Any, numbers: Any) -> Any:
    """[1, n] integers where the model is."""
    import torch

    return torch.tensor([list(numbers)], device=model.device)


class Asked:
    """A model that answers with a press.

    Attributes:
        model: of transformers, for which the presses were made.
        budget, block_size: what is kept of full blocks, rounded up to whole ones; the last block
            stays, if it is not full.
    """

    def __init__(self, folder: str, name: str, budget: float, block_size: int) -> None:
        self.folder, self.attention = folder, "eager" if name in EAGER else "sdpa"
        self.model = load(folder, self.attention)
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
        num_kept, press = self.num_kept(len(tokens)), None
        if num_kept < len(tokens):
            # Presses keep int(n * (1 - ratio)).
            press = self.press(1 - (num_kept + 0.5) / len(tokens))
        done = prefill(self.folder, self.attention, tuple(tokens))
        return done.compressed(press), done.logits

    def go_on(self, cache: Any, tokens: list[int], start: int) -> Any:
        """Logits of what follows further tokens; positions go on from the uncompressed length."""
        positions = ids_row(self.model, range(start, start + len(tokens)))
        ids = ids_row(self.model, tokens)
        return self.model(ids, past_key_values=cache, position_ids=positions).logits[0]

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
        wanted = ids_row(self.model, continuation[1:])[0]
        return -float(logits.log_softmax(dim=-1).gather(1, wanted[:, None]).mean())


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
    reply = asked.reply(context, question, item.max_tokens)
    text = tokenizer.decode(reply, skip_special_tokens=True)
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
    still_open = [
        (number, mode, name, budget)
        for number, item in enumerate(items)
        for mode in ((TEXT,) if item.continuation else MODES[options.mode])
        for name, budget in setups
        if (name != FULL or mode in (TEXT, AWARE))
        and (named(name, budget), mode, number) not in done
    ]
    with path.open("a") as output:
        for number, mode, name, budget in tqdm(still_open, disable=not still_open):
            asked = Asked(options.model, name, budget, options.block_size)
            record = answer(asked, tokenizer, items[number], prompts[number], mode)
            setup = named(name, budget)
            answers.append({"setup": setup, "mode": mode, "item": number, **record})
            output.write(json.dumps(answers[-1]) + "\n")
            output.flush()
    return answers


def named(name: str, budget: float) -> str:
    """What a press at a budget is called in answers."""
    return FULL if name == FULL else f"{name}@{budget:g}"


def read(folder: Path) -> list[Answer]:
    """Answers of a run of this script, or of `eval`."""
    return [json.loads(line) for line in (folder / ANSWERS).read_text().splitlines()]


def key(answer: Answer) -> tuple[str, str, int]:
    """Setup, mode and number of the question."""
    return answer["setup"], answer["mode"], answer["item"]


def values(answers: list[Answer]) -> dict[tuple[str, str, str, int], float]:
    """By setup, mode, task and number within it: the score, or what a text loses, in nats."""
    full = {a["item"]: a["nats"] for a in answers if a["setup"] == FULL}
    first: dict[tuple[str, int], int] = {}
    for record in answers:
        task = record["task"], record["length"]
        first[task] = min(record["item"], first.get(task, record["item"]))
    return {
        (a["setup"], a["mode"], a["task"], a["item"] - first[a["task"], a["length"]]): (
            a["nats"] - full[a["item"]] if a["mode"] == TEXT else a["score"]
        )
        for a in answers
    }


def beside(
    theirs: list[Answer], ours: list[Answer], policy: str | None = None
) -> list[dict[str, Any]]:
    """Means of every press and of ours, with their difference, question by question.

    Args:
        theirs, ours: answers of this script, and of `eval`.
        policy: ours that every press is compared with; None: the one of its name.

    Returns:
        By setup and mode: the policy, what each question came to on both sides, both means, their
        difference and its standard error.
    """
    kvpress, here = values(theirs), values(ours)
    rows = []
    for setup, mode in dict.fromkeys(at[:2] for at in kvpress):
        budget, own = setup.partition("@")[2], setup
        if policy is not None and budget:
            own = f"{named_policy(policy, True, float(budget))}@{budget}"
        asked = [at for at in kvpress if at[:2] == (setup, mode) and (own, *at[1:]) in here]
        if setup == FULL or len(asked) < 2:
            continue
        own_scores = [here[own, *at[1:]] for at in asked]
        scores = [kvpress[at] for at in asked]
        differences = [ours - other for ours, other in zip(own_scores, scores, strict=True)]
        numbers = {
            "here": fmean(own_scores),
            "kvpress": fmean(scores),
            "difference": fmean(differences),
            "error": stdev(differences) / math.sqrt(len(asked)),
        }
        questions = {
            f"{task} {number}": [round(own_scores[at], 4), round(scores[at], 4)]
            for at, (_, _, task, number) in enumerate(asked)
        }
        means = {name: round(value, 4) for name, value in numbers.items()}
        rows.append({"setup": setup, "mode": mode, "policy": own, **means, "questions": questions})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of what `beside` returns."""
    lines = [
        "| setup | texts | here | kvpress | difference | two standard errors |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        numbers = row["here"], row["kvpress"], row["difference"], 2 * row["error"]
        cells = " | ".join(f"{value:.3f}" for value in numbers)
        name = row["setup"] if row["mode"] == TEXT else f"{row['setup']}, {row['mode']}"
        lines.append(f"| `{name}` | {len(row['questions'])} | {cells} |")
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
        rows = beside(answers, ours, options.policy)
        lines = ",\n".join(map(json.dumps, rows))
        (options.out / BESIDE).write_text(f'{{"rows": [\n{lines}\n]}}\n')
        print(markdown(rows))


if __name__ == "__main__":
    import torch

    with torch.no_grad():
        main()
