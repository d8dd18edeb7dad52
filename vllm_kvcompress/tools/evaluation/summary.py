"""Summarises answers: one row per setup and mode, and tables of these rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from vllm_kvcompress.tools.evaluation.setups import ASKED, AWARE, FULL, TEXT

DEPTHS = 5  # parts of a context in the map of needle depths


def summarize(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per setup and mode, in the order in which they first appear.

    Shares are in [0, 1]; None or empty stands for what was not measured. A row has:

        setup, mode, questions
        score: mean over tasks and lengths of the mean score; None for texts
        score_error: standard error of the score over questions; None for fewer than two
        reply_tokens: mean length of replies; None for texts
        tasks: the score (of texts the loss) by task and length
        agreement: share of greedy tokens that equal the full cache's, position by position
        nats: per predicted token of texts
        loss, loss_interval: nats above the full cache's, and the 95% interval over texts
        kept: resident tokens over prompt tokens
        read: the share of the prompt that a decode step reads
        resident_bytes: mean; 0 if unknown
        first_token_ms, token_ms: medians
        kept_tokens: mean by layer and KV head
        depths: mean score by length and depth of the needle
    """
    full = {answer["item"]: answer for answer in answers if answer["setup"] == FULL}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        groups[answer["setup"], answer["mode"]].append(answer)
    return [_row(setup, mode, group, full) for (setup, mode), group in groups.items()]


def _row(
    setup: str, mode: str, answers: list[dict[str, Any]], full: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    token_seconds = [answer["token_seconds"] for answer in answers if answer["token_seconds"]]
    return {
        "setup": setup,
        "mode": mode,
        "questions": len(answers),
        **(_text_figures(answers, full) if mode == TEXT else _scores(answers, full)),
        "kept": fmean(a["resident_tokens"] / a["prompt_tokens"] for a in answers),
        "read": fmean(
            a.get("read_part", 1.0) * a["resident_tokens"] / a["prompt_tokens"] for a in answers
        ),
        "resident_bytes": fmean(a["resident_bytes"] for a in answers),
        "first_token_ms": 1000 * median(a["first_token_seconds"] for a in answers),
        "token_ms": 1000 * median(token_seconds) if token_seconds else None,
        "kept_tokens": _mean_heads([a["kept_tokens"] for a in answers if a["kept_tokens"]]),
        "depths": _depths(answers),
    }


def _scores(answers: list[dict[str, Any]], full: dict[int, dict[str, Any]]) -> dict[str, Any]:
    scores = [answer["score"] for answer in answers]
    tasks = _by_task(answers, scores)
    same = [agreement(a["tokens"], full[a["item"]]["tokens"]) for a in answers if full]
    return {
        "score": fmean(tasks.values()),
        "score_error": stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
        "reply_tokens": fmean(len(answer["tokens"]) for answer in answers),
        "tasks": tasks,
        "agreement": fmean(same) if same else None,
        "nats": None,
        "loss": None,
        "loss_interval": None,
    }


def _text_figures(answers: list[dict[str, Any]], full: dict[int, dict[str, Any]]) -> dict[str, Any]:
    losses = [answer["nats"] - full[answer["item"]]["nats"] for answer in answers if full]
    return {
        "score": None,
        "score_error": None,
        "reply_tokens": None,
        "tasks": _by_task(answers, losses or [answer["nats"] for answer in answers]),
        "agreement": None,
        "nats": fmean(answer["nats"] for answer in answers),
        "loss": fmean(losses) if losses else None,
        "loss_interval": interval(losses) if len(losses) > 1 else None,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval of the mean of two values or more, by Student's t.

    The quantile is that of the normal distribution, expanded in 1 / degrees of freedom (Abramowitz
    and Stegun 26.7.5): within 1% from four values on.
    """
    z, freedom = NormalDist().inv_cdf(0.975), len(values) - 1
    quantile = z + (z**3 + z) / (4 * freedom)
    quantile += (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    quantile += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    mean, half = fmean(values), quantile * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _by_task(answers: list[dict[str, Any]], values: Sequence[float]) -> dict[str, float]:
    """Mean of the answers' values by task and length."""
    tasks: dict[str, list[float]] = defaultdict(list)
    for answer, value in zip(answers, values, strict=True):
        name = f"{answer['task']}@{answer['length']}" if answer["length"] else answer["task"]
        tasks[name].append(value)
    return {name: fmean(task_values) for name, task_values in tasks.items()}


def _depths(answers: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Mean score by length, in DEPTHS equal parts of the context; None where nothing was asked."""
    scores: dict[int, list[list[float]]] = defaultdict(lambda: [[] for _ in range(DEPTHS)])
    for answer in answers:
        if answer["depth"] is not None:
            part = min(DEPTHS - 1, int(answer["depth"] * DEPTHS))
            scores[answer["length"]][part].append(answer["score"])
    return {
        str(length): [fmean(part) if part else None for part in parts]
        for length, parts in sorted(scores.items())
    }


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions at which two replies agree, over the length of the longer one."""
    longest = max(len(tokens), len(reference))
    if not longest:
        return 1.0
    return sum(a == b for a, b in zip(tokens, reference, strict=False)) / longest


def _mean_heads(maps: list[list[list[float]]]) -> list[list[float]]:
    """Mean over answers of [layers][heads]."""
    return [
        [fmean(heads) for heads in zip(*layers, strict=True)] for layers in zip(*maps, strict=True)
    ]


def reads_less(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether any setup reads less than it keeps, so that tables need a column for it."""
    return any(row["read"] < row["kept"] for row in rows)


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, a line per setup with the modes side by side."""
    by_setup: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_setup[row["setup"]][row["mode"]] = row
    asked = [mode for mode in ASKED if any(row["mode"] == mode for row in rows)]
    texts, reads = any(row["mode"] == TEXT for row in rows), reads_less(rows)
    heads = ["setup", "kept", *["read"] * reads]
    heads += [head for mode in asked for head in (mode, f"{mode}: agreement", f"{mode}: tokens")]
    heads += ["text: loss, nats per token (95%)"] * texts
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for setup, modes in by_setup.items():
        cells = [f"`{setup}`"]
        cells += [
            percent(fmean(row[name] for row in modes.values())) for name in heads[1 : 2 + reads]
        ]
        for mode in asked:
            row = modes.get(AWARE if setup == FULL else mode, {})
            cells += [score_text(row), percent(row.get("agreement")), reply_text(row)]
        cells += [loss_text(modes.get(TEXT))] * texts
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def loss_text(row: dict[str, Any] | None) -> str:
    """A row's loss on texts for people, such as 0.062 (0.048 to 0.077); the full cache's nats."""
    if row is None or row["nats"] is None:
        return "-"
    if row["setup"] == FULL or row["loss"] is None:
        return f"({row['nats']:.3f} nats)"
    if row["loss_interval"] is None:
        return f"{row['loss']:.3f}"
    low, high = row["loss_interval"]
    return f"{row['loss']:.3f} ({low:.3f} to {high:.3f})"


def score_text(row: dict[str, Any]) -> str:
    """A row's score and its standard error for people, such as 62.5% ± 7.0."""
    error = row.get("score_error")
    return percent(row.get("score")) + ("" if error is None else f" ± {100 * error:.1f}")


def reply_text(row: dict[str, Any]) -> str:
    """A row's mean length of replies in tokens; "-" for texts."""
    tokens = row.get("reply_tokens")
    return "-" if tokens is None else f"{tokens:.0f}"


def percent(share: float | None) -> str:
    """A share as a percentage; "-" for None."""
    return "-" if share is None else f"{100 * share:.1f}%"


def table_cells(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The rows' figures for people, by column; columns without any figure are left out."""
    reads = reads_less(rows)
    cells = [
        {
            "setup": row["setup"],
            "mode": "" if row["setup"] == FULL else row["mode"],
            "kept": percent(row["kept"]),
            "read": percent(row["read"] if reads else None),
            "resident": f"{row['resident_bytes'] / 2**20:.2f} MiB" if row["resident_bytes"] else "",
            "score": score_text(row),
            "agreement": percent(row["agreement"]),
            "reply tokens": reply_text(row),
            "first token": f"{row['first_token_ms']:.1f} ms",
            "per token": "" if row["token_ms"] is None else f"{row['token_ms']:.1f} ms",
            "loss on texts (95%)": loss_text(row),
        }
        for row in rows
    ]
    shown = [name for name in cells[0] if any(line[name] not in ("", "-") for line in cells)]
    return [{name: line[name] for name in shown} for line in cells]


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a terminal."""
    cells = table_cells(rows)
    columns = [[name, *(line[name] for line in cells)] for name in cells[0]]
    padded = [
        [text.ljust(max(map(len, column))) for text in column]
        if column[0] in ("setup", "mode")
        else [text.rjust(max(map(len, column))) for text in column]
        for column in columns
    ]
    return "\n".join("  ".join(line) for line in zip(*padded, strict=True))
