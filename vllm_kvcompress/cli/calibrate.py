"""`vllm-kvcompress calibrate`: measures what a policy loses at which budget, for `loss:F`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_kvcompress.cli.eval import add_engine_option, progress_bar
from vllm_kvcompress.cli.loss_budget import default_file
from vllm_kvcompress.config.auto import AUTO, NO_POLICY, profile_beside
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags
from vllm_kvcompress.tools.calibration.bounds import CONFIDENCE
from vllm_kvcompress.tools.calibration.measure import (
    Request,
    left_out,
    measure,
    own_texts,
    user_texts,
)
from vllm_kvcompress.tools.calibration.record import (
    WHOLE,
    Calibration,
    conditions_of,
    digest_of_model,
)
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer
from vllm_kvcompress.tools.files import check_writable

_SETTINGS = ("policy", "trigger", "params", "profile", "measure_heads")
_BUDGETS = (0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.7)
_LIMITS = (0.01, 0.02, 0.05, 0.1)  # nats per token, of the tables that are printed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for what is calibrated, and on which texts."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face name or directory")
    group = parser.add_argument_group("settings, as of serve; --kv-policy is auto unless said")
    add_flags(group, Settings, "settings", _SETTINGS)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='your traffic: JSON lines of {"text": ...}, a prompt and its answer in each, or '
        "FILE.txt, a text; without it four kinds of texts that come with Python",
    )
    parser.add_argument(
        "--length",
        default="1024",
        metavar="N,...",
        help="tokens that are compressed; several, such as 1024,4096, give longer prompts a budget "
        "of their own (1024)",
    )
    parser.add_argument(
        "--continuation", type=int, default=128, help="tokens behind them that are predicted (128)"
    )
    parser.add_argument(
        "--samples", type=int, default=80, help="texts of each kind at most, without --data (80)"
    )
    parser.add_argument(
        "--budgets",
        default=",".join(map(str, _BUDGETS)),
        metavar="B,...",
        help=f"the ladder of budgets ({','.join(map(str, _BUDGETS))})",
    )
    parser.add_argument(
        "--cap",
        type=float,
        default=0.5,
        metavar="NATS",
        help="a text that loses more per token counts as this much; with a lower one fewer texts "
        "suffice (0.5)",
    )
    parser.add_argument("--concurrency", type=int, default=8, help="texts at once (8)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the calibration; the default is where --kv-budget loss:F looks for it",
    )
    add_engine_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, writes the calibration, and prints what may be promised."""
    import vllm

    settings = {"policy": AUTO} | arguments.settings
    lengths, budgets = _checked(arguments)
    conditions = conditions_of(settings, arguments.model)
    out = arguments.out or default_file(arguments.model, settings["policy"], conditions)
    check_writable(out)
    request = Request(
        model=arguments.model,
        policy=settings["policy"],
        params=_params(settings, arguments.model),
        budgets=budgets,
        items=_items(arguments, lengths),
        engine=dict(arguments.engine),
        concurrency=arguments.concurrency,
    )
    losses = measure(request, out.parent, progress_bar)
    calibration = Calibration(
        model=arguments.model,
        model_digest=digest_of_model(arguments.model),
        policy=request.policy,
        conditions=conditions,
        vllm=vllm.__version__,
        lengths=lengths,
        continuation=arguments.continuation,
        cap=arguments.cap,
        confidence=CONFIDENCE,
        budgets=budgets,
        texts=tuple(losses),
    )
    calibration.write(out)
    print("\n".join(report(calibration)))
    print(f"written: {out}")
    return 0


def _params(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """The settings of all setups, as `eval` has them."""
    params = {"trigger": None, "params": {}, "profile": None, **settings}
    if params.pop("policy") == AUTO and params["profile"] is None:
        params["profile"] = profile_beside(model)
    return params


def _items(arguments: argparse.Namespace, lengths: tuple[int, ...]) -> list[Any]:
    tokenizer = load_tokenizer(arguments.model)
    sizes = (lengths, arguments.continuation)
    if arguments.data is not None:
        return user_texts(arguments.data, *sizes, tokenizer)
    return own_texts(*sizes, arguments.samples, tokenizer)


def _checked(arguments: argparse.Namespace) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The lengths and the ladder of budgets, ascending; ConfigError: an option cannot work."""
    if arguments.settings.get("policy") == NO_POLICY:
        raise ConfigError(
            f"--kv-policy {NO_POLICY} loses nothing: expected a policy to calibrate, such as auto."
        )
    try:
        lengths = [int(text) for text in arguments.length.split(",")]
    except ValueError:
        raise ConfigError(
            f"--length {arguments.length}: expected numbers of tokens, such as 1024,4096."
        ) from None
    if arguments.continuation < 2 or min(*lengths, arguments.samples) < 1:
        raise ConfigError(
            "--length and --samples: expected at least 1, --continuation at least 2, since the "
            "first token is predicted before anything is compressed."
        )
    if not arguments.cap > 0 or arguments.concurrency < 1:
        raise ConfigError("--cap: expected more than 0 nats per token; --concurrency: at least 1.")
    try:
        budgets = [float(text) for text in arguments.budgets.split(",")]
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget < 1 for budget in budgets):
        raise ConfigError(
            f"--budgets {arguments.budgets}: expected fractions of the prompt above 0 and below 1, "
            "such as 0.1,0.25,0.5."
        )
    return tuple(sorted(set(lengths))), tuple(sorted(set(budgets)))


def report(calibration: Calibration) -> list[str]:
    """The lines that say what was measured, and what may be promised."""
    rungs, lines = calibration.rungs(), []
    for length in calibration.lengths:
        lines.append(f"texts of {length} tokens")
        lines.append("budget  texts  mean loss  95% bound  other half")
        for rung in rungs:
            if rung.length == length:
                numbers = f"{rung.num_texts:5}  {rung.mean:9.4f}  {rung.bound:9.4f}"
                lines.append(f"{rung.budget:6g}  {numbers}  {rung.checked_mean:10.4f}")
    checked = {(rung.length, rung.budget): rung.checked_mean for rung in rungs}
    for limit in _LIMITS:
        for length, budget in calibration.by_length(limit).items():
            promise = f"loss:{limit:g} from {length} tokens on: "
            if budget == WHOLE:
                lines.append(f"{promise}no budget below 1.0 is sure to lose so little")
                continue
            mean = checked[length, budget]
            held = "holds" if mean <= limit else "DOES NOT HOLD"
            lines.append(f"{promise}budget {budget:g}; on the other half {mean:.4f}: {held}")
    cases = [case for case in left_out(calibration, _LIMITS) if case.budget < WHOLE]
    if cases:
        held_by = sum(case.holds for case in cases)
        lines.append(f"on a kind of text that was left out it holds in {held_by} of {len(cases)}:")
        lines += [
            f"  {case.kind}, {case.length} tokens: loss:{case.limit:g}  budget {case.budget:g}, "
            f"{case.mean:.4f}"
            for case in cases
            if not case.holds
        ]
    return lines
