"""Answers, summed up: one row per setup and mode, beside the full cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from vllm_kvcompress.tools.evaluation.setups import AGNOSTIC, AWARE, FULL

DEPTHS = 5  # parts of a context in the map of needle depths


def summarize(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per setup and mode, in the order in which they first appear.

    Returns:
        Per row: `setup`, `mode`, `score` (mean over tasks and lengths of the mean score, in
        [0, 1]), `tasks` (the same by task and length), `agreement` (share of greedy tokens that
        equal the full cache's, position by position; None without it), `kept` (resident over
        prompt tokens), `resident_bytes` (mean; 0 if unknown), `first_token_ms` and `token_ms`
        (medians), `kept_tokens` (mean by layer and KV head), `attention_error` and
        `attention_mass` (relative error of attention outputs and share of the attention weights
        on tokens that were not evicted, mean over layers and query heads; None where nothing was
        compressed) and `head_errors`, `head_masses` (the same by layer and query head), `depths`
        (mean score by length and depth of the needle, where questions have one).
    """
    full = {answer["item"]: answer["tokens"] for answer in answers if answer["setup"] == FULL}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for answer in answers:
        groups[answer["setup"], answer["mode"]].append(answer)
    return [_row(setup, mode, group, full) for (setup, mode), group in groups.items()]


def _row(
    setup: str, mode: str, answers: list[dict[str, Any]], full: dict[int, list[int]]
) -> dict[str, Any]:
    tasks: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        name = f"{answer['task']}@{answer['length']}" if answer["length"] else answer["task"]
        tasks[name].append(answer["score"])
    means = {name: fmean(scores) for name, scores in tasks.items()}
    errors = _mean_heads([a["attention_error"] for a in answers if a["attention_error"]])
    masses = _mean_heads([a["attention_mass"] for a in answers if a["attention_mass"]])
    # Measuring attention takes time: those answers do not count here, if there are others.
    timed = [answer for answer in answers if not answer["attention_error"]] or answers
    further = [answer["token_seconds"] for answer in timed if answer["token_seconds"]]
    return {
        "setup": setup,
        "mode": mode,
        "questions": len(answers),
        "score": fmean(means.values()),
        "tasks": means,
        "agreement": fmean(agreement(a["tokens"], full[a["item"]]) for a in answers)
        if full
        else None,
        "kept": fmean(a["resident_tokens"] / a["prompt_tokens"] for a in answers),
        "resident_bytes": fmean(a["resident_bytes"] for a in answers),
        "first_token_ms": 1000 * median(a["first_token_seconds"] for a in timed),
        "token_ms": 1000 * median(further) if further else None,
        "kept_tokens": _mean_heads([a["kept_tokens"] for a in answers if a["kept_tokens"]]),
        "attention_error": _mean(errors),
        "attention_mass": _mean(masses),
        "head_errors": errors,
        "head_masses": masses,
        "depths": _depths(answers),
    }


def _depths(answers: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Mean score by length, in DEPTHS equal parts of the context; None where nothing was asked."""
    found: dict[int, list[list[float]]] = defaultdict(lambda: [[] for _ in range(DEPTHS)])
    for answer in answers:
        if answer["depth"] is not None:
            part = min(DEPTHS - 1, int(answer["depth"] * DEPTHS))
            found[answer["length"]][part].append(answer["score"])
    return {
        str(length): [fmean(part) if part else None for part in found[length]]
        for length in sorted(found)
    }


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions at which two replies say the same, of the longer one's length."""
    longest = max(len(tokens), len(reference))
    if not longest:
        return 1.0
    return sum(a == b for a, b in zip(tokens, reference, strict=False)) / longest


def _mean_heads(maps: list[list[list[float]]]) -> list[list[float]]:
    """Mean over answers of [layers][heads]."""
    return [
        [fmean(heads) for heads in zip(*layers, strict=True)] for layers in zip(*maps, strict=True)
    ]


def _mean(heads: list[list[float]]) -> float | None:
    return fmean(map(fmean, heads)) if heads else None


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per setup: kept tokens, and what was lost in either mode, in percent."""
    by_setup: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_setup.setdefault(row["setup"], {})[row["mode"]] = row
    columns = [f"{mode}{what}" for mode in (AWARE, AGNOSTIC) for what in _SHARES.values()]
    lines = [f"| setup | kept | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for setup, modes in by_setup.items():
        kept = fmean(row["kept"] for row in modes.values())
        cells = [f"`{setup}`", percent(kept)]
        for mode in (AWARE, AGNOSTIC):
            found = modes.get(AWARE if setup == FULL else mode)
            cells += [percent(found[name] if found else None) for name in _SHARES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# Rows' entries for tables, and what is written behind the mode's name.
_SHARES = {
    "score": "",
    "agreement": ": agreement",
    "attention_mass": ": mass",
    "attention_error": ": error",
}


def percent(share: float | None) -> str:
    """A share for people to read; "-" for none."""
    return "-" if share is None else f"{100 * share:.1f}%"


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a terminal: shares in percent."""
    lines = [
        f"{'setup':28}{'mode':16}{'kept':>7}{'score':>8}{'agree':>8}{'mass':>8}{'error':>8}"
        f"{'ttft':>10}{'token':>9}"
    ]
    for row in rows:
        mode = "" if row["setup"] == FULL else row["mode"]
        token = f"{row['token_ms']:.1f}ms" if row["token_ms"] is not None else "-"
        lines.append(
            f"{row['setup']:28}{mode:16}{percent(row['kept']):>7}{percent(row['score']):>8}"
            f"{percent(row['agreement']):>8}{percent(row['attention_mass']):>8}"
            f"{percent(row['attention_error']):>8}{row['first_token_ms']:>8.1f}ms{token:>9}"
        )
    return "\n".join(lines)
