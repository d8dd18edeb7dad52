"""`vllm-kvcompress recommend`: finds the cheapest setting that loses little enough."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_kvcompress.cli import eval
from vllm_kvcompress.cli.eval import plan_of, progress_bar, write_results
from vllm_kvcompress.config.auto import AUTO
from vllm_kvcompress.config.fields import DEFAULT_MIN_TOKENS
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import runner
from vllm_kvcompress.tools.evaluation.setups import FULL, TEXT, Setup

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
                if name == "calibration":  # the budget has followed from it
                    continue
                texts = [f"{k}={v}" for k, v in value.items()] if name == "params" else [str(value)]
                command += [part for text in texts for part in (Settings.flag(name), text)]
            command += engine_flags(plan.engine)
            print(f"{best} loses at most {_bounds(arguments)}; serve it with")
            print(f"    {shlex.join(command)}")
            return 0
    print(f"every setting that was tried loses more than {_bounds(arguments)}")
    return 1


def engine_flags(engine: Mapping[str, Any]) -> list[str]:
    """Returns the options of `vllm serve` that mean the same as keyword arguments of an engine."""
    flags: list[str] = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        else:
            flags += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def rounds(setups: Sequence[Setup]) -> Iterator[list[Setup]]:
    """Yields all setups up to each budget, from the smallest on; always with the full cache.

    Fractions and tokens are not comparable: fractions come first.
    """
    budgets = {setup.budget for setup in setups if setup.budget is not None}
    ordered = sorted(budgets, key=lambda budget: (isinstance(budget, int), budget))
    for count in range(1, len(ordered) + 1):
        tried = ordered[:count]
        yield [setup for setup in setups if setup.policy == FULL or setup.budget in tried]


def cheapest(
    rows: Sequence[dict[str, Any]], max_loss: float, max_nats: float = math.inf
) -> str | None:
    """Returns the setup that keeps least of those that are good enough in every mode, or None.

    Of equally cheap setups the better one wins, then the earlier one.

    Args:
        rows: from `summarize`, the full cache among them.
        max_loss: share of the full cache's score that may be lost.
        max_nats: nats per token by which texts may be predicted worse.
    """
    full = [row["score"] for row in rows if row["setup"] == FULL and row["mode"] != TEXT]
    least = (1 - max_loss) * full[0] if full else 0.0

    def good(row: dict[str, Any]) -> bool:
        if row["mode"] == TEXT:
            return bool(row["loss"] <= max_nats)
        return bool(row["score"] >= least)

    def price(modes: list[dict[str, Any]]) -> tuple[float, float, float]:
        """What is kept; among equals the worst score, then the worst loss."""
        scores = [row["score"] for row in modes if row["mode"] != TEXT]
        losses = [row["loss"] for row in modes if row["mode"] == TEXT]
        kept = round(max(row["kept"] for row in modes), 3)
        return kept, -min(scores, default=0.0), max(losses, default=0.0)

    setups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["setup"] != FULL:
            setups.setdefault(row["setup"], []).append(row)
    good_enough = [name for name, modes in setups.items() if all(map(good, modes))]
    return min(good_enough, key=lambda name: price(setups[name]), default=None)


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
        raise argparse.ArgumentTypeError(f"expected a share such as 1% or 0.01, found {text}")
    return share
