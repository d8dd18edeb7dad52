"""`vllm-kvcompress eval`: measures what policies cost in quality, on a model, at budgets."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from vllm_kvcompress.cli.loss_budget import resolve_budget
from vllm_kvcompress.config.auto import AUTO, DEFAULT_BUDGET, profile_beside
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags, json_or_text
from vllm_kvcompress.scheduling.budgets import parse_budget, parse_loss
from vllm_kvcompress.tools.evaluation import items, runner
from vllm_kvcompress.tools.evaluation.metrics import check_metric
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer
from vllm_kvcompress.tools.evaluation.runner import Plan
from vllm_kvcompress.tools.evaluation.setups import MODES, SERVER, Setup, setups_of
from vllm_kvcompress.tools.evaluation.summary import markdown_table, summarize, text_table
from vllm_kvcompress.tools.files import write_whole

# Settings of all policies.
_SHARED = ("trigger", "params", "profile", "measure_heads", "min_tokens", "calibration")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for what is asked, of which settings, and how the engine is built."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face name or directory")
    add_questions(parser)
    _add_settings(parser)
    add_engine_option(parser)
    parser.add_argument(
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="questions asked at once; above 1 they take less time in all, but attention is not "
        "measured, and times are those of a busy engine (1)",
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="ask a running server instead of starting engines; MODEL is then the tokenizer's. "
        "Nobody else should use the server meanwhile",
    )
    parser.add_argument(
        "--served-name", metavar="NAME", help="what that server calls the model (MODEL)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for answers.jsonl, results.json, results.md and report.html; a stopped run "
        "resumes from it",
    )


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Adds options for what is asked."""
    asked = parser.add_argument_group("questions")
    asked.add_argument(
        "--tasks",
        type=_list,
        default=[],
        metavar="T,...",
        help="ruler (RULER's 13 tasks), reasoning (5 kinds of problems that need written steps), "
        "longbench (its 16 English tasks), text (how well texts that come with Python are "
        "predicted), or single ones such as ruler/niah_single_2 or text/source",
    )
    asked.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON lines of {context, question, answers}; or FILE.txt, a text to predict",
    )
    asked.add_argument(
        "--longbench-data",
        type=Path,
        metavar="DIR",
        help="LongBench's published files, one TASK.jsonl per task",
    )
    asked.add_argument("--metric", default="exact_match", help="metric for --data (exact_match)")
    asked.add_argument(
        "--max-tokens", type=int, default=64, help="length limit of replies to --data (64)"
    )
    asked.add_argument(
        "--lengths", type=_list, default=["1024"], metavar="N,...", help="tokens of contexts (1024)"
    )
    asked.add_argument(
        "--continuation",
        type=int,
        default=256,
        metavar="N",
        help="tokens after a text's context that are predicted (256)",
    )
    asked.add_argument("--samples", type=int, default=10, help="questions per task and length (10)")
    asked.add_argument("--seed", type=int, default=2_000_000, help="question seed (2000000)")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    compared = parser.add_argument_group("settings to compare, besides the full cache")
    compared.add_argument(
        "--policies", type=_list, default=[AUTO], metavar="P,...", help="policies (auto)"
    )
    compared.add_argument(
        "--budgets",
        type=_list,
        default=[str(DEFAULT_BUDGET)],
        metavar="B,...",
        help=f"budgets of each policy ({DEFAULT_BUDGET})",
    )
    compared.add_argument(
        "--mode",
        choices=("aware", "agnostic", "both", "prepared"),
        default="both",
        help="compress the context together with the question, or before it is known (both); "
        "prepared: before, by a request that repeats the context",
    )
    compared.add_argument(
        "--kv-read",
        action="append",
        default=[],
        metavar="R",
        help="also hold everything and have decode steps read a part, such as quest:0.25, or read "
        'so of what a policy keeps, such as "spans@0.5 quest:0.5"; may be repeated. Not asked for '
        "texts, which are prompts and read whole",
    )
    add_flags(compared, Settings, "settings", _SHARED)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints a table and writes results.json, results.md and report.html."""
    plan = plan_of(arguments)
    if not plan.base_url:
        names = ", ".join(setup.name for setup in plan.setups)
        print(f"compares {names}; --policies and --budgets change that", flush=True)
    write_results(plan, arguments.out, runner.run(plan, arguments.out, progress_bar))
    return 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The evaluation that the options ask for.

    Raises:
        ConfigError: a setting that cannot work.
    """
    if arguments.concurrency < 1 or (arguments.base_url and arguments.concurrency > 1):
        raise ConfigError(
            f"--concurrency {arguments.concurrency}: expected at least 1, and 1 with --base-url, "
            "since a server's metrics tell of one request at a time only."
        )
    profile = arguments.settings.get("profile")
    read_of = [read.partition("@")[0].strip() for read in arguments.kv_read]
    if profile is None and AUTO in [*arguments.policies, *read_of]:
        profile = profile_beside(arguments.model)
    params: dict[str, Any] = {"trigger": None, "params": {}, **arguments.settings}
    params["profile"] = profile
    calibration = params.pop("calibration", None)
    if arguments.mode == "prepared":
        params["reuse_contexts"] = True
        _check_prepared(arguments)
    setups = setups_of(
        arguments.policies,
        [text if parse_loss(text) else parse_budget(text) for text in arguments.budgets],
        params,
        arguments.kv_read,
        partial(_budget_by_loss, arguments.model, params | {"calibration": calibration}),
    )
    if arguments.base_url:
        setups = [Setup(SERVER)]
    return Plan(
        model=arguments.model,
        items=items_of(arguments),
        setups=setups,
        modes=MODES[arguments.mode],
        params=params,
        engine=dict(arguments.engine),
        base_url=arguments.base_url or "",
        served_name=arguments.served_name or arguments.model,
        concurrency=arguments.concurrency,
    )


def _budget_by_loss(model: str, params: dict[str, Any], policy: str, text: str) -> float:
    """The fraction that a budget such as loss:0.02 stands for, by the policy's calibration."""
    chosen = resolve_budget({**params, "policy": policy, "budget": text}, model)
    if longer := chosen.get("longer_budgets"):
        raise ConfigError(
            f"--budgets {text}: the calibration has a budget by length, {chosen['budget']:g} from "
            f"{chosen['min_tokens']} tokens on, then {longer}; give these instead."
        )
    return float(chosen["budget"])


def _check_prepared(arguments: argparse.Namespace) -> None:
    """Refuses `--mode prepared` with settings that do not support it, before anything is asked."""
    from vllm_kvcompress.vllm_plugin.request_options import check_preparation

    if arguments.base_url:
        raise ConfigError(
            "--mode prepared: expected no --base-url, since eval sets its engines up for it; leave "
            "one out."
        )
    for policy in arguments.policies:
        if policy != "full":
            chosen = {
                "policy": policy,
                "trigger": arguments.settings.get("trigger"),
                "reuse_contexts": True,
            }
            check_preparation(Settings.from_dict(chosen))


def write_results(plan: Plan, folder: Path, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints the table, writes results.json, results.md and report.html; returns the rows."""
    rows = summarize(answers)
    results = {**plan.answers_key(), "rows": rows}
    write_whole(folder / "results.json", json.dumps(results, indent=2) + "\n")
    write_whole(folder / "results.md", markdown_table(rows))
    print(text_table(rows))
    if importlib.util.find_spec("matplotlib") is not None:
        from vllm_kvcompress.tools.evaluation.report import html_report

        write_whole(folder / "report.html", html_report(plan.model, rows))
        print(f"report: {folder / 'report.html'}")
    else:
        print("no report.html: it needs matplotlib (pip install 'vllm-kvcompress[report]')")
    return rows


def items_of(arguments: argparse.Namespace) -> list[Any]:
    """The questions and texts that the options of `add_questions` ask for.

    Raises:
        ConfigError: there are none.
    """
    if not arguments.tasks and not arguments.data:
        raise ConfigError("nothing to ask: give --tasks, or questions of your own with --data.")
    check_metric(arguments.metric, "--metric")
    if arguments.samples < 1 or arguments.max_tokens < 1:
        raise ConfigError("--samples and --max-tokens: expected at least 1.")
    if arguments.continuation < 2:
        raise ConfigError(
            "--continuation: expected at least 2, since the first token is predicted before "
            "anything is compressed."
        )
    lengths = [_count(text) for text in arguments.lengths]
    questions: list[Any] = []
    for task in arguments.tasks:
        suite, samples, seed = items.split_task(task)[0], arguments.samples, arguments.seed
        if suite == items.LONGBENCH:
            questions += items.load_longbench(task, arguments.longbench_data, samples)
        elif suite == items.TEXT:
            questions += items.load_texts(task, lengths, arguments.continuation, samples, seed)
        else:
            count_tokens = _token_counter(arguments.model)
            questions += items.generate(task, lengths, samples, seed, count_tokens)
    for path in arguments.data:
        if path.suffix == ".txt":
            counts = (arguments.continuation, arguments.samples)
            questions += items.load_text(path, lengths, *counts)
        else:
            questions += items.load(path, arguments.metric, arguments.max_tokens)
    return questions


@cache
def _token_counter(model: str) -> Callable[[str], int]:
    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer(text)["input_ids"])


def progress_bar(num_done: int, num_all: int) -> Callable[[str], None]:
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
    if not text.isdecimal() or len(text) > 15 or int(text) < 1:
        raise ConfigError(f"--lengths {text}: expected numbers of tokens, such as 1024,4096.")
    return int(text)


def add_engine_option(parser: argparse._ActionsContainer) -> None:
    """Adds the option for keyword arguments of engines."""
    parser.add_argument(
        "--engine",
        type=engine_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument of every vllm.LLM, such as max_model_len=4096",
    )


def engine_option(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE into a keyword argument of `vllm.LLM`; the value is JSON or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE")
    return name.replace("-", "_"), json_or_text(value)
