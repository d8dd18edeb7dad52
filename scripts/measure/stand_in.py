"""Compares settings on few cores: text loss and needles with evicted tokens masked, no engine.

    python scripts/measure/stand_in.py models/smollm2 --seed 100 --out choice.jsonl spans@0.25 \\
        snapkv:window_size=64,kernel_size=5,pooling=mean@0.25 quest:0.25

A context is read once for all settings, and compressed once, at its end; texts and answers are
teacher-forced. An answer counts as found where the model would have written every token of it.
Of the questions, those that the full cache answers are counted. Runs go on where they stopped.
What `--kv-read` takes is a setting, too: all is held, and tokens behind the prompt read a part;
"spans@0.5 quest:0.5" reads a half of what is kept. `--caches` are types of the cache that every
setting is tried in, simulated; losses are those beside the full cache in the first of them, which
is to be `auto`. Computes in float32 where the CPU would emulate bfloat16, or in --dtype.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from offline.dense import DenseLayer, Kept, compress
from offline.masked import MaskedModel, Reading
from offline.quantized import CACHES
from offline.rows import append_rows, read_rows
from vllm_kvcompress.cache.quantization import mean_key
from vllm_kvcompress.options import assignment
from vllm_kvcompress.policies import Pipeline, resolve
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.items import generate, load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt
from vllm_kvcompress.tools.evaluation.summary import interval

FULL, TEXT, KNOWN, UNKNOWN = "full", "text", "known", "not known"
RECALL, MASS = "recall", "mass"  # of texts, where a part is read
READS = ("quest", "longcache")
OTHER_RUN = 1_000_000  # numbers of items begin there, one million for each run
NEEDLES = ("niah_single_1", "niah_single_2", "niah_multikey_1")
Choose = Callable[[list[DenseLayer]], list[Kept]]
Row = dict[str, Any]


class QuantizedModel(MaskedModel):
    """Its cache is in one of `CACHES`, with keys less the mean that follows from their bias.

    Attributes:
        cache: which.
        stores_whole: whether keys are stored whole, as by stock vLLM.
    """

    cache = "auto"
    stores_whole = False

    def _attend(self, module: Any, query: Any, key: Any, value: Any, *more: Any, **how: Any) -> Any:
        if self.cache != "auto":
            mean = 0 if self.stores_whole else self._mean_key(module, key.shape[-1])
            key = CACHES[self.cache](key - mean) + mean
            value = CACHES[self.cache](value)
        return super()._attend(module, query, key, value, *more, **how)

    def _mean_key(self, module: Any, size: int) -> Any:
        """Returns the [heads, 1, size] mean of the bias of a layer's keys; 0: there is none."""
        bias, rotary = module.k_proj.bias, self._rotary()
        if bias is None or rotary is None:
            return 0
        return mean_key(bias.view(-1, size), rotary)[:, None]


def in_cache(setup: str, cache: str) -> str:
    """Names a setting with its cache, which is left out where it is the model's type."""
    return setup if cache == "auto" else f"{setup} in {cache}"


@cache
def pipeline_of(setup: str) -> tuple[Pipeline, float, int | None]:
    """Parses POLICY[:NAME=VALUE,...]@BUDGET into the pipeline, the budget and `queries`.

    Of the parameters, `profile` is the file of measured heads, and `queries` how many of the last
    queries are there to observe, as behind a prefix-cache hit.
    """
    policy, _, budget = setup.rpartition("@")
    name, _, text = policy.partition(":")
    params = dict(assignment("parameter", part) for part in text.split(",") if part)
    profile = params.pop("profile", None)
    queries = params.pop("queries", None)
    pipeline = resolve(name, params, None if profile is None else Path(str(profile)))
    return pipeline, float(budget), None if queries is None else int(str(queries))


def reads(setup: str, num_whole: int = 0) -> Reading | None:
    """What a setting reads behind the prompt's last tokens; None: everything."""
    read = setup.split()[-1]
    return Reading(ReadRule.parse(read), num_whole) if read.startswith(READS) else None


def keeps(setup: str, context: list[DenseLayer]) -> list[Kept] | None:
    """What a setting keeps of every layer; None: everything."""
    if setup == FULL or setup.startswith(READS):
        return None
    pipeline, budget, max_queries = pipeline_of(setup.split()[0])
    num_tokens = context[0].keys.shape[1]
    return [compress(pipeline, layer, num_tokens, budget, max_queries) for layer in context]


def text_loss(model: MaskedModel, tokens: tuple[list[int], list[int]], setups: list[str]) -> Row:
    """Nats per token of what follows a context, by setting; the first token is left out."""
    context, continuation = model.layers(tokens[0]), torch.tensor(tokens[1])
    losses = {}
    for setup in setups:
        reading = reads(setup)
        logits = model.logits(context, keeps(setup, context), continuation[:-1], reading)
        nats = torch.nn.functional.cross_entropy(logits, continuation[1:])
        losses[setup] = float(nats)
        if reading is not None:
            best, weights = (statistics.mean(each) for each in zip(*reading.recalls, strict=True))
            losses[setup, RECALL], losses[setup, MASS] = best, weights
    return losses


def answers(
    model: MaskedModel,
    layers: list[DenseLayer],
    question: list[int],
    answer: list[int],
    setups: list[str],
) -> Row:
    """Whether a model would write an answer, by setting; the question is not compressed."""
    asked = torch.tensor([*question, *answer[:-1]])
    scores = {}
    for setup in setups:
        reading = reads(setup, len(question))
        logits = model.logits(layers, keeps(setup, layers), asked, reading)
        said = logits.argmax(dim=1)[-len(answer) + (not question) :].tolist()
        scores[setup] = said == answer[not question :]
    return scores


def rows_of(model: MaskedModel, tokenizer: Any, item: Item, setups: list[str]) -> Iterator[Row]:
    """One per mode and setting."""
    context, rest = split_prompt(tokenizer, item)
    if item.continuation:
        by_mode = {TEXT: text_loss(model, (context, rest), setups)}
    else:
        answer = tokenizer(f" {item.answers[0]}", add_special_tokens=False)["input_ids"]
        layers = model.layers([*context, *rest])
        alone = [layer.first(len(context)) for layer in layers]
        # With the question in the prompt an answer's first token is predicted before the event.
        by_mode = {
            KNOWN: answers(model, layers, [], answer, setups),
            UNKNOWN: answers(model, alone, rest, answer, setups),
        }
    for mode, values in by_mode.items():
        for setup, value in values.items():
            name, measured = setup if isinstance(setup, tuple) else (setup, mode)
            yield {"task": item.task, "mode": measured, "setup": name, "value": value}


def table(rows: list[Row], setups: list[str]) -> Iterator[str]:
    """Text loss with its difference from the first setting's, and needles, by setting."""
    by_setup: dict[str, dict[tuple[str, int], Any]] = {}
    for row in rows:
        by_setup.setdefault(row["setup"], {})[row["mode"], row["item"]] = row["value"]
    full = by_setup.pop(FULL)
    texts = sorted(key for key in full if key[0] == TEXT)
    tasks = {row["item"]: row["task"] for row in rows}
    kinds = sorted({tasks[number] for _, number in texts})
    head = ["setup", "loss (standard error)", "more than the first (95%)", *kinds, KNOWN, UNKNOWN]
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * (5 + len(kinds))
    for setup in setups:
        values = by_setup[setup]
        loss = {key: values[key] - full[key] for key in texts if key in values}
        other = [values[key] - by_setup[setups[0]][key] for key in loss]
        cells = [with_error(list(loss.values()))]
        low, high = interval(other) if len(other) > 1 else (0.0, 0.0)
        cells += [f"{sum(other) / max(1, len(other)):+.3f} ({low:+.3f} to {high:+.3f})"]
        for kind in kinds:
            of_kind = [value for (_, number), value in loss.items() if tasks[number] == kind]
            cells.append(f"{statistics.mean(of_kind):.3f}")
        for mode in (KNOWN, UNKNOWN):
            able = [key for key in full if key[0] == mode and full[key] and key in values]
            cells.append(f"{sum(values[key] for key in able)} of {len(able)}")
        yield f"| `{label(setup)}` | {' | '.join(cells)} |"
    for setup in setups:
        lines = [
            statistics.mean(value for key, value in by_setup[setup].items() if key[0] == mode)
            for mode in (RECALL, MASS)
            if any(key[0] == mode for key in by_setup[setup])
        ]
        if lines:
            yield (
                f"`{setup}` reads {lines[0]:.0%} of the 64 tokens with the highest products, "
                f"and {lines[1]:.0%} of the attention weights."
            )


def label(setup: str) -> str:
    """A setting's name without the folder of its profile."""
    return re.sub(r"profile=[^,@ ]*/", "profile=", setup)


def with_error(values: list[float]) -> str:
    """A mean, and its standard error if there are two values or more."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ({error:.3f})"


def plot(rows: list[Row], setups: list[str], path: Path) -> None:
    """Needles found over text loss, a point for each setting and mode."""
    import matplotlib.pyplot as plt

    values = {(row["setup"], row["mode"], row["item"]): row["value"] for row in rows}
    full = {key[1:]: value for key, value in values.items() if key[0] == FULL}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True)
    for axis, mode in zip(axes, (KNOWN, UNKNOWN), strict=True):
        for setup in setups:
            texts = [key for key in full if key[0] == TEXT]
            loss = statistics.mean(values[(setup, *key)] - full[key] for key in texts)
            able = [key for key, score in full.items() if key[0] == mode and score]
            score = 100 * statistics.mean(values[(setup, *key)] for key in able)
            axis.plot(loss, score, "o", color="tab:blue")
            axis.annotate(setup, (loss, score), (4, 4), textcoords="offset points", fontsize=7)
        axis.set_title(f"question {mode}")
        axis.set_xlabel("text loss, nats per token")
        axis.set_xlim(left=0)
        axis.set_ylim(-5, 110)
    axes[0].set_ylabel("needles found, %")
    figure.tight_layout()
    figure.savefig(path)


def items_of(options: argparse.Namespace, tokenizer: Any) -> list[Item]:
    """Texts and questions, from kind to kind, so that a run that is stopped has some of each."""
    lengths = [options.length]
    items: list[Item] = []
    for kind in options.kinds if options.texts else ():
        items += load_texts(kind, lengths, options.continuation, options.texts, options.seed)

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    for task in options.tasks if options.needles else ():
        items += generate(f"ruler/{task}", lengths, options.needles, options.seed, count)
    tasks = [item.task for item in items]
    place_in_task = [tasks[:number].count(task) for number, task in enumerate(tasks)]
    return [items[number] for number in sorted(range(len(items)), key=place_in_task.__getitem__)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument(
        "setups",
        nargs="+",
        metavar="POLICY[:NAME=VALUE,...]@BUDGET",
        help="parameters may have profile=FILE, for policies that read one, and queries=N, where "
        "events have no more of the last queries; or what --kv-read takes, or both: "
        '"spans@0.5 quest:0.5"',
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="of texts (256)")
    parser.add_argument("--texts", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--kinds", nargs="+", default=["text"], help="such as text/prose (all)")
    parser.add_argument("--needles", type=int, default=4, help="questions of each task (4)")
    parser.add_argument("--tasks", nargs="+", default=NEEDLES, help="of RULER")
    parser.add_argument(
        "--caches", nargs="+", choices=CACHES, default=["auto"], help="types of caches (auto)"
    )
    parser.add_argument("--whole-keys", action="store_true", help="store keys as stock vLLM does")
    parser.add_argument("--seed", type=int, default=0, help="of texts and questions (0)")
    parser.add_argument("--dtype", default=fast_dtype(), help="that computes (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help="other runs of these settings, of other seeds, that the printed table counts as well",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="needles over text loss")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer = load_tokenizer(options.model)
    model = QuantizedModel(options.model, getattr(torch, options.dtype))
    model.stores_whole = options.whole_keys
    setups = [FULL, *options.setups]
    named = [in_cache(setup, each) for each in options.caches for setup in setups]
    rows = read_rows(options.out)
    done = {(row["item"], row["setup"]) for row in rows}
    for number, item in enumerate(tqdm(items_of(options, tokenizer), unit="item")):
        for model.cache in options.caches:
            missing = [each for each in setups if (number, in_cache(each, model.cache)) not in done]
            if not missing:
                continue
            new = [{"item": number, **row} for row in rows_of(model, tokenizer, item, missing)]
            new = [row | {"setup": in_cache(row["setup"], model.cache)} for row in new]
            rows += new
            append_rows(options.out, new)
    shown = [name for name in named if name != FULL]
    for place, path in enumerate(options.beside, start=1):
        rows += [row | {"item": row["item"] + place * OTHER_RUN} for row in read_rows(path)]
    print("\n".join(table(rows, shown)))
    if options.plot:
        plot(rows, shown, options.plot)


if __name__ == "__main__":
    main()
