"""`vllm-kvcompress recommend`: finds the cheapest setting that loses little enough."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import Any

from vllm_kvcompress.cli import eval
from vllm_kvcompress.cli.eval import plan_of, progress_bar, write_results
from vllm_kvcompress.config import AUTO, DEFAULT_MIN_TOKENS, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import runner
from vllm_kvcompress.tools.evaluation.recommendation import cheapest, rounds

_POLICIES = [AUTO, "snapkv", "adakv", "adakv+criticalkv", "keydiff"]
_BUDGETS = ["0.1", "0.15", "0.25", "0.35", "0.5", "0.7"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `eval`, and the losses that are permitted."""
    eval.add_options(parser)
    parser.add_argument(
        "--max-loss",
        type=_share,
        default=0.01,
        metavar="SHARE",
        help="share of the full cache's score that may be lost in any mode: 1%% or 0.01 (1%%)",
    )
    parser.add_argument(
        "--max-text-loss",
        type=float,
        default=0.02,
        metavar="NATS",
        help="nats per predicted token of texts that may be lost (0.02)",
    )
    parser.set_defaults(policies=_POLICIES, budgets=_BUDGETS)


def run(arguments: argparse.Namespace) -> int:
    """Tries budgets from the smallest on; returns 1 if no setting is good enough."""
    if arguments.base_url:
        raise ConfigError(
            "--base-url: a running server has one setting, so there is nothing to choose; leave it "
            "out, or measure the server with `vllm-kvcompress eval`."
        )
    plan = plan_of(arguments)
    rows: list[dict[str, Any]] = []
    for setups in rounds(plan.setups):
        tried = replace(plan, setups=setups)
        rows = write_results(tried, arguments.out, runner.run(tried, arguments.out, progress_bar))
        best = cheapest(rows, arguments.max_loss, arguments.max_text_loss)
        if best is not None:
            check_compressed([row for row in rows if row["setup"] == best])
            policy, _, budget = best.rpartition("@")
            command = ["vllm-kvcompress", "serve", plan.model, "--kv-policy", policy]
            command += ["--kv-budget", budget]
            for name, value in arguments.settings.items():
                texts = [f"{k}={v}" for k, v in value.items()] if name == "params" else [str(value)]
                command += [part for text in texts for part in (Settings.flag(name), text)]
            print(f"{best} loses at most {_bounds(arguments)}; serve it with")
            print(f"    {shlex.join(command)}")
            return 0
    print(f"every setting that was tried loses more than {_bounds(arguments)}")
    return 1


def check_compressed(rows: list[dict[str, Any]]) -> None:
    """Refuses to recommend a setting under which every question was left uncompressed."""
    if all(row["kept"] >= 1 for row in rows):
        raise ConfigError(
            "nothing was compressed, so nothing was measured: expected questions of at least "
            f"--kv-min-tokens ({DEFAULT_MIN_TOKENS}) tokens; give longer ones, or a lower limit."
        )


def _bounds(arguments: argparse.Namespace) -> str:
    """The permitted losses in words."""
    return (
        f"{100 * arguments.max_loss:g}% of the score and {arguments.max_text_loss:g} nats per "
        "token of texts"
    )


def _share(text: str) -> float:
    """Parses a share such as `1%` or `0.01`."""
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(f"--max-loss {text}: expected a share such as 1% or 0.01.")
    return share
