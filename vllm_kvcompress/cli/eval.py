"""`vllm-kvcompress eval`: what policies cost in quality, on a model, at budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_kvcompress.config import parse_budget
from vllm_kvcompress.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "eval", help="measure what policies cost in quality, through the serving engine"
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face name or directory")
    parser.add_argument(
        "--tasks",
        type=_list,
        default=[],
        metavar="T,...",
        help="words (the word-level variant of RULER's families, for the reference model), or "
        "single families such as words/multikey",
    )
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON lines of {context, question, answers}",
    )
    parser.add_argument("--metric", default="exact_match", help="of --data (exact_match)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of replies to --data (64)")
    parser.add_argument(
        "--lengths", type=_list, default=["1024"], metavar="N,...", help="tokens of contexts (1024)"
    )
    parser.add_argument("--samples", type=int, default=10, help="per task and length (10)")
    parser.add_argument("--policies", type=_list, default=["adakv+criticalkv"], metavar="P,...")
    parser.add_argument("--budgets", type=_list, default=["0.25"], metavar="B,...")
    parser.add_argument(
        "--mode",
        choices=("aware", "agnostic", "both"),
        default="both",
        help="compress the context together with the question, or before it is known (both)",
    )
    parser.add_argument("--kv-trigger", help="of all policies (prompt)")
    parser.add_argument("--kv-profile", help="for headkv and duoattention")
    parser.add_argument(
        "--engine",
        type=_engine_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument of vllm.LLM, such as max_model_len=4096",
    )
    parser.add_argument("--seed", type=int, default=2_000_000, help="of the questions (2000000)")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="takes answers.jsonl and results.json; a run that was stopped goes on from there",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints a table and writes `results.json`.

    Raises:
        ConfigError: a setting that cannot work.
        EngineError: an engine ended.
    """
    from vllm_kvcompress.evaluation import runner
    from vllm_kvcompress.evaluation.setups import MODES, setups_of
    from vllm_kvcompress.evaluation.summary import summarize, text_table

    params = {"trigger": arguments.kv_trigger, "profile": arguments.kv_profile}
    budgets = [parse_budget(text) for text in arguments.budgets]
    plan = runner.Plan(
        model=arguments.model,
        items=_items(arguments),
        setups=setups_of(arguments.policies, budgets, params),
        modes=MODES[arguments.mode],
        params=params,
        engine=dict(arguments.engine),
    )
    rows = summarize(runner.run(plan, arguments.out, _progress_bar))
    results = {**plan.answers_key(), "rows": rows}
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(text_table(rows))
    return 0


def _items(arguments: argparse.Namespace) -> list[Any]:
    from vllm_kvcompress.evaluation import items
    from vllm_kvcompress.evaluation.metrics import METRICS

    if not arguments.tasks and not arguments.data:
        raise ConfigError("nothing to ask: give --tasks, or questions of your own with --data.")
    if arguments.metric not in METRICS:
        raise ConfigError(f"--metric {arguments.metric}: known are {', '.join(METRICS)}.")
    if arguments.samples < 1 or arguments.max_tokens < 1:
        raise ConfigError("--samples and --max-tokens: expected at least 1.")
    lengths = [_count(text) for text in arguments.lengths]
    found: list[Any] = []
    for task in arguments.tasks:
        found += items.generate(task, lengths, arguments.samples, arguments.seed)
    for path in arguments.data:
        found += items.load(path, arguments.metric, arguments.max_tokens)
    return found


def _progress_bar(num_done: int, num_all: int) -> Callable[[str], None]:
    from tqdm import tqdm

    bar = tqdm(total=num_all, initial=num_done, unit="question")

    def advance(what: str) -> None:
        bar.set_description(what, refresh=False)
        bar.update()
        if bar.n == num_all:
            bar.close()

    return advance


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--lengths {text}: expected numbers of tokens, such as 1024,4096.")
    return int(text)


def _engine_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value
