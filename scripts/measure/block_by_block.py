"""Text loss of policies that compress on the way: block by block, at the prompt's end, decoding.

    python scripts/measure/block_by_block.py models/smollm2 --out blocks.jsonl
    python scripts/measure/block_by_block.py models/smollm2 --out long.jsonl --triggers decode:128 \
        --budgets 256,1024 --length 512 --continuation 4096 --policies snapkv,rkv --against snapkv

Without an engine (`offline/blockwise.py`): what was never compressed is
read once for all settings. What a policy carries from event to event (h2o's sums) takes no room
here. Runs go on where they stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from offline.blockwise import BlockwiseModel
from offline.dense import BLOCK_SIZE
from offline.rows import append_rows, read_rows
from vllm_kvcompress.config.auto import NO_POLICY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.registry import reads_profile
from vllm_kvcompress.scheduling.rule import PolicyDemand
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt
from vllm_kvcompress.tools.evaluation.summary import interval

POLICIES = "keydiff,keydiff+window,tova,snapkv,h2o,streamingllm"
TRIGGERS = ("chunk:128", "prompt", "prompt,decode:128")
PART = 512  # tokens of the continuation whose loss is also noted by itself
Row = dict[str, Any]


def losses(
    model: BlockwiseModel, tokens: list[int], num_context: int, row: Row, profile: Path | None
) -> Tensor:
    """Nats of every predicted token of one text at a row's policy, trigger and budget."""
    whole = row["policy"] == NO_POLICY
    settings = {name: row[name] for name in ("policy", "trigger", "budget")}
    policy = "streamingllm" if whole else row["policy"]
    pipeline = resolve(policy, profile=profile if reads_profile(policy) else None)
    settings = Settings.from_dict({**settings, "min_tokens": 0})
    rule = settings.rule(BLOCK_SIZE, PolicyDemand(window_size=pipeline.needs.window_size))
    return model.losses(tokens, num_context, pipeline, rule)


def table(rows: list[Row], policies: list[str], against: str | None = None) -> Iterator[str]:
    """Loss by policy, trigger and budget, and how much more it is, text by text.

    More than at the prompt's end, where that was measured, and than another policy's loss.
    """
    names = ("policy", "trigger", "budget", "item")
    nats = {tuple(row[name] for name in names): row["nats"] for row in rows}
    settings = list(dict.fromkeys(key[1:3] for key in nats if key[0] != NO_POLICY))
    full = {key[3]: value for key, value in nats.items() if key[0] == NO_POLICY}
    paired = [each for each in settings if each[0] != "prompt" and ("prompt", each[1]) in settings]
    yield f"{len(full)} texts, full cache {statistics.mean(full.values()):.3f} nats"
    heads = [f"`{trigger}`, {budget:g}" for trigger, budget in settings]
    heads += [f"`{trigger}`, {budget:g}: more than `prompt`" for trigger, budget in paired]
    if against is not None:
        heads += [f"{head}: more than `{against}`" for head in heads[: len(settings)]]
    yield f"| policy | {' | '.join(heads)} |"
    yield "|" + "---|" * (1 + len(heads))
    for policy in policies:
        cells = [_cell([nats[policy, *each, i] - full[i] for i in full], "") for each in settings]
        cells += [
            _cell([nats[policy, *each, i] - nats[policy, "prompt", each[1], i] for i in full], "+")
            for each in paired
        ]
        if against is not None:
            cells += [
                _cell([nats[policy, *each, i] - nats[against, *each, i] for i in full], "+")
                for each in settings
            ]
        yield f"| `{policy}` | {' | '.join(cells)} |"


def parts(rows: list[Row]) -> Iterator[str]:
    """Loss in each stretch of `PART` predicted tokens, by policy and setting."""
    by_setting: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("policy", "trigger", "budget"))
        by_setting.setdefault(key, {})[row["item"]] = row["by_part"]
    full = by_setting.pop((NO_POLICY, "prompt", 1.0))
    count = min(map(len, full.values()))
    yield f"| loss of {PART} tokens | {' | '.join(f'to {PART * (i + 1)}' for i in range(count))} |"
    yield "|" + "---|" * (1 + count)
    for (policy, trigger, budget), by_item in by_setting.items():
        means = (statistics.mean(by_item[i][n] - full[i][n] for i in full) for n in range(count))
        cells = " | ".join(f"{mean:.3f}" for mean in means)
        yield f"| `{policy}`, `{trigger}`, {budget:g} | {cells} |"


def _cell(values: list[float], sign: str) -> str:
    """Mean and 95% interval."""
    low, high = interval(values)
    mean = statistics.mean(values)
    return f"{mean:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument(
        "--policies", type=lambda text: text.split(","), default=POLICIES.split(",")
    )
    parser.add_argument("--triggers", nargs="+", default=TRIGGERS)
    parser.add_argument(
        "--budgets",
        type=lambda text: [float(each) if "." in each else int(each) for each in text.split(",")],
        default=[0.25],
        help="parts, or tokens per head (0.25)",
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens behind them (256)")
    parser.add_argument("--texts", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--first", type=int, help="texts, from kind to kind (all)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first text (0)")
    parser.add_argument("--profile", type=Path, help="measured heads, for +headkv")
    parser.add_argument("--against", help="policy that others are compared with, text by text")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer, model = load_tokenizer(options.model), BlockwiseModel(options.model)
    items = load_texts("text", [options.length], options.continuation, options.texts, options.seed)
    rows = read_rows(options.out)
    done = {(row["item"], row["policy"], row["trigger"], row["budget"]) for row in rows}
    settings: list[tuple[str, str, float]] = [(NO_POLICY, "prompt", 1.0)]
    settings += product(options.policies, options.triggers, options.budgets)
    # From kind to kind, so that a run that is stopped has some of each.
    order = sorted(range(len(items)), key=lambda number: number % options.texts)
    for number in tqdm(order[: options.first], unit="text"):
        context, continuation = split_prompt(tokenizer, items[number])
        tokens = [*context, *continuation]
        for setting in settings:
            if (number, *setting) in done:
                continue
            row = {"item": number, "task": items[number].task}
            row |= dict(zip(("policy", "trigger", "budget"), setting, strict=True))
            lost = losses(model, tokens, len(context), row, options.profile)
            row["nats"] = float(lost.mean())
            row["by_part"] = [round(float(part.mean()), 4) for part in lost.split(PART)]
            rows.append(row)
            append_rows(options.out, [row])
    print("\n".join([*table(rows, options.policies, options.against), "", *parts(rows)]))


if __name__ == "__main__":
    main()
