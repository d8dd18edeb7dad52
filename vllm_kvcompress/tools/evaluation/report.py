"""Writes the results as one HTML file without scripts or links: a table, and plots as SVG."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from vllm_kvcompress.tools.evaluation.setups import AGNOSTIC, ASKED, AWARE, FULL, TEXT
from vllm_kvcompress.tools.evaluation.summary import DEPTHS, table_cells


def html_report(model: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page of a model's results, from the rows of `summarize`."""
    compressed = [row for row in rows if row["setup"] != FULL]
    sections = {
        "Score against kept tokens": _quality(rows),
        "Loss on texts against kept tokens": _text_loss(compressed),
        "All settings": _table(rows),
        "Where the needle lies": _depths(rows),
        "Tokens kept per layer and KV head": _heads(compressed),
    }
    body = f"<h1>KV-cache compression of {html.escape(model)}</h1>{_intro(rows)}"
    body += "".join(f"<h2>{title}</h2>{part}" for title, part in sections.items() if part)
    page = Template(Path(__file__).with_suffix(".html").read_text())
    return page.substitute(title=html.escape(model), body=body)


def _intro(rows: Sequence[dict[str, Any]]) -> str:
    asked = {row["mode"] == TEXT: row for row in rows}
    texts = []
    if question := asked.get(False):
        tasks = ", ".join(map(html.escape, question["tasks"]))
        texts.append(
            f"{question['questions']} questions for every setting and mode; tasks: {tasks}. "
            f"<b>{AWARE}</b>: the question is part of what is compressed. <b>{AGNOSTIC}</b>: the "
            "context is compressed before the question is read."
        )
    if predicted := asked.get(True):
        tasks = ", ".join(map(html.escape, predicted["tasks"]))
        texts.append(
            f"{predicted['questions']} texts for every setting: {tasks}. <b>{TEXT}</b>: so many "
            "tokens of each are compressed, and those that follow are predicted."
        )
    return "".join(f"<p>{text}</p>" for text in texts)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = table_cells(rows)
    head = "".join(f"<th>{name}</th>" for name in cells[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line.values())}</tr>"
        for line in cells
    )
    caption = "Agreement: share of greedy tokens equal to the full cache's."
    table = f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
    return f'{table}<p class="caption">{caption}</p>'


def _quality(rows: Sequence[dict[str, Any]]) -> str:
    """Score against the share of tokens read, one panel per mode."""
    full = next((r for r in rows if r["setup"] == FULL and r["mode"] != TEXT), None)
    panels = ""
    for mode in ASKED:
        points = [
            (row, 100 * row["score"])
            for row in rows
            if row["setup"] != FULL and row["mode"] == mode
        ]
        if not points:
            continue
        figure, axis = _line_plot(rows, points, None if full is None else 100 * full["score"])
        axis.set(title=mode, ylabel="score, %", xlabel="tokens that are read, % of the prompt")
        axis.set_ylim(-2, 103)
        panels += _svg(figure)
    return _panels(panels, "Mean over tasks. Dashed: the full cache.")


def _text_loss(rows: Sequence[dict[str, Any]]) -> str:
    """Loss on texts against the share of tokens read: a panel for all texts and one per kind."""
    text_rows = [row for row in rows if row["loss"] is not None]
    kinds = list(text_rows[0]["tasks"]) if text_rows else []
    panels = ""
    for kind in [None, *kinds] if len(kinds) > 1 else kinds:
        losses = [row["loss"] if kind is None else row["tasks"][kind] for row in text_rows]
        figure, axis = _line_plot(rows, list(zip(text_rows, losses, strict=True)), 0)
        axis.set(title=kind or "all texts", ylabel="loss, nats per token")
        axis.set(xlabel="tokens that are read, % of context and continuation")
        panels += _svg(figure)
    return _panels(
        panels,
        "By how much worse what follows a compressed context is predicted, in the mean over texts. "
        "Dashed: the full cache.",
    )


def _line_plot(
    rows: Sequence[dict[str, Any]],
    points: Sequence[tuple[dict[str, Any], float]],
    full_cache: float | None,
) -> tuple[Any, Any]:
    """A figure and its axes: one line per policy, in the same colour in every plot of the page.

    Args:
        rows: all rows of the page.
        points: the rows that are drawn, each with its height.
        full_cache: height of the dashed line; None for no line.
    """
    figure, axis = _plot(4.5, 4.8)
    names = dict.fromkeys(_line_name(row) for row in rows if row["setup"] != FULL)
    for number, name in enumerate(names):
        line = sorted(
            (100 * row["read"], height) for row, height in points if _line_name(row) == name
        )
        if line:
            marker = "osD^vPX"[number % 7]  # colours repeat after 10: no pair does before 70
            shape = {"marker": marker, "markersize": 5, "color": f"C{number % 10}"}
            axis.plot(*zip(*line, strict=True), label=name, **shape)
    axis.grid(alpha=0.3)
    if full_cache is not None:
        axis.axhline(full_cache, color="black", linestyle="--", linewidth=1)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure, axis


def _line_name(row: dict[str, Any]) -> str:
    """The policy or read rule of a setup, without its amounts."""
    return re.split("[@:]", row["setup"])[0]


def _depths(rows: Sequence[dict[str, Any]]) -> str:
    """Mean score by length and depth of the needle."""

    def drawn(row: dict[str, Any]) -> tuple[str, Any]:
        lengths = list(row["depths"])
        figure, axis = _plot(2.2, 0.9 + 0.3 * len(lengths))
        scores = [
            [math.nan if score is None else score for score in row["depths"][length]]
            for length in lengths
        ]
        axis.imshow(scores, vmin=0, vmax=1, cmap="RdYlBu", aspect="auto")
        axis.set_xticks([-0.5, DEPTHS / 2 - 0.5, DEPTHS - 0.5], ["0", "depth", "1"], fontsize=8)
        axis.set_yticks(range(len(lengths)), lengths, fontsize=8)
        return "", figure

    return _maps(
        [row for row in rows if row["depths"]],
        drawn,
        "Mean score by length (rows) and depth of the needle (columns), from red, 0, over yellow "
        "to blue, 1; white: not asked.",
    )


def _heads(rows: Sequence[dict[str, Any]]) -> str:
    """Kept tokens by layer and head, relative to their mean."""

    def drawn(row: dict[str, Any]) -> tuple[str, Any]:
        tokens = row["kept_tokens"]
        mean = sum(map(sum, tokens)) / sum(map(len, tokens))
        shares = [[head / mean for head in layer] for layer in tokens]
        figure, axis = _plot(2.2, 1.4)
        axis.imshow(shares, vmin=0, vmax=2, cmap="viridis", aspect="auto")
        axis.set_xticks([])
        axis.set_yticks([])
        return f"<br>mean {mean:.0f} tokens", figure

    return _maps(
        [row for row in rows if row["kept_tokens"]],
        drawn,
        "Mean over questions; rows are layers, columns heads; from dark, none, over green, the "
        "mean, to yellow, twice the mean.",
    )


def _maps(
    rows: Sequence[dict[str, Any]],
    drawn: Callable[[dict[str, Any]], tuple[str, Any]],
    caption: str,
) -> str:
    """One map per setup and mode; `drawn` returns what stands below its name, and the figure."""
    maps = ""
    for row in rows:
        facts, figure = drawn(row)
        mode = "" if row["setup"] == FULL else f"<br>{row['mode']}"
        name = f"<figcaption>{html.escape(row['setup'])}{mode}{facts}</figcaption>"
        maps += f"<figure>{name}{_svg(figure)}</figure>"
    return maps and f'<p class="caption">{caption}</p><div class="maps">{maps}</div>'


def _panels(panels: str, caption: str) -> str:
    return panels and f'<div class="panels">{panels}</div><p class="caption">{caption}</p>'


def _plot(width: float, height: float) -> Any:
    """A figure and its axes, without matplotlib's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    """A matplotlib figure as inline SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
