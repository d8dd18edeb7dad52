"""Text loss of policies that compress on the way: block by block, at the prompt's end, decoding.

    python scripts/measure/block_by_block.py models/smollm2 --out blocks.jsonl

Without an engine (`offline/blockwise.py`): what was never compressed is
read once for all settings. What a policy carries from event to event (h2o's sums) takes no room
here. Runs go on where they stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offline.blockwise import BlockwiseModel
from offline.dense import BLOCK_SIZE
from offline.rows import append_rows, read_rows
from vllm_kvcompress.config import NO_POLICY, Settings
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt
from vllm_kvcompress.tools.evaluation.summary import interval

POLICIES = "keydiff,keydiff+window,tova,snapkv,h2o,streamingllm"
TRIGGERS = ("chunk:128", "prompt", "prompt,decode:128")
Row = dict[str, Any]


def nats(
    model: BlockwiseModel,
    tokens: list[int],
    num_context: int,
    policy: str,
    trigger: str,
    budget: float,
) -> float:
    """Nats per predicted token of one text at one setting."""
    settings = {"policy": policy, "trigger": trigger, "budget": budget, "min_tokens": 0}
    pipeline = resolve("streamingllm" if policy == NO_POLICY else policy)
    rule = Settings.from_dict(settings).rule(BLOCK_SIZE, pipeline.needs.window_size)
    return model.nats(tokens, num_context, pipeline, rule)


def table(rows: list[Row], policies: list[str]) -> Iterator[str]:
    """Loss by policy and trigger, and how much more it is than at the prompt's end."""
    nats_by_run = {(row["policy"], row["trigger"], row["item"]): row["nats"] for row in rows}
    triggers = [each for each in TRIGGERS if any(row["trigger"] == each for row in rows)]
    full = {item: value for (policy, _, item), value in nats_by_run.items() if policy == NO_POLICY}
    yield f"{len(full)} texts, full cache {statistics.mean(full.values()):.3f} nats"
    yield f"| policy | {' | '.join(f'`{each}` | more than `prompt`' for each in triggers)} |"
    yield "|" + "---|" * (1 + 2 * len(triggers))
    for policy in policies:
        cells = []
        for trigger in triggers:
            losses = {i: nats_by_run[policy, trigger, i] - full[i] for i in full}
            more = [
                nats_by_run[policy, trigger, i] - nats_by_run[policy, "prompt", i] for i in full
            ]
            low, high = interval(list(losses.values()))
            cells.append(f"{statistics.mean(losses.values()):.3f} ({low:.3f} to {high:.3f})")
            low, high = interval(more)
            cells.append(f"{statistics.mean(more):+.3f} ({low:+.3f} to {high:+.3f})")
        yield f"| `{policy}` | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument(
        "--policies", type=lambda text: text.split(","), default=POLICIES.split(",")
    )
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens behind them (256)")
    parser.add_argument("--texts", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first text (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer, model = load_tokenizer(options.model), BlockwiseModel(options.model)
    items = load_texts("text", [options.length], options.continuation, options.texts, options.seed)
    rows = read_rows(options.out)
    done = {(row["item"], row["policy"], row["trigger"]) for row in rows}
    settings = [(NO_POLICY, "prompt")]
    settings += [(policy, trigger) for trigger in TRIGGERS for policy in options.policies]
    # From kind to kind, so that a run that is stopped has some of each.
    order = sorted(range(len(items)), key=lambda number: number % options.texts)
    for number in tqdm(order, unit="text"):
        context, continuation = split_prompt(tokenizer, items[number])
        tokens = [*context, *continuation]
        for policy, trigger in settings:
            if (number, policy, trigger) in done:
                continue
            row = {"item": number, "task": items[number].task, "policy": policy}
            row |= {"trigger": trigger}
            row["nats"] = nats(model, tokens, len(context), policy, trigger, options.budget)
            rows.append(row)
            append_rows(options.out, [row])
    print("\n".join(table(rows, options.policies)))


if __name__ == "__main__":
    main()
