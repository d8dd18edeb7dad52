"""The results as one HTML file without scripts or links: a table, and plots as SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

from vllm_kvcompress.evaluation.setups import AGNOSTIC, AWARE, FULL
from vllm_kvcompress.evaluation.summary import DEPTHS, percent

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
svg { width: 100%; height: auto; }
@media print { h2 { break-after: avoid; } figure { break-inside: avoid; } }
figure { margin: 0; }
figcaption { color: #555; }
"""
_COLUMNS = ("setup", "mode", "kept", "score", "agreement", "first token", "per token")


def html_report(model: str, rows: Sequence[dict[str, Any]]) -> str:
    """The whole page.

    Args:
        model: name, for the title.
        rows: of `summarize`.
    """
    compressed = [row for row in rows if row["setup"] != FULL]
    parts = [f"<h1>KV-cache compression of {html.escape(model)}</h1>", _intro(rows)]
    if compressed:
        parts.append("<h2>Score against kept tokens</h2>")
        parts.append(_figure(_quality(rows), "Dashed: the full cache. Mean over tasks."))
    parts += ["<h2>All settings</h2>", _table(rows)]
    if any(row["depths"] for row in rows):
        parts.append("<h2>Where the needle lies</h2>")
        parts.append(
            _figure(_depths(rows), "Mean score by length (rows) and depth of the needle (columns).")
        )
    if any(row["kept_tokens"] for row in compressed):
        parts.append("<h2>Tokens kept per layer and KV head</h2>")
        parts.append(
            _figure(_heads(compressed), "Mean over questions; columns are heads, rows layers.")
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(model)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _intro(rows: Sequence[dict[str, Any]]) -> str:
    tasks = ", ".join(html.escape(task) for task in rows[0]["tasks"]) if rows else "none"
    return (
        f"<p>{rows[0]['questions'] if rows else 0} questions for every setting and mode; tasks: "
        f"{tasks}. <b>{AWARE}</b>: the question is part of what is compressed. <b>{AGNOSTIC}</b>: "
        "the context is compressed before the question is read.</p>"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    body = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cells(row: dict[str, Any]) -> list[str]:
    mode = "" if row["setup"] == FULL else row["mode"]
    token = "" if row["token_ms"] is None else f"{row['token_ms']:.1f} ms"
    texts = [row["setup"], mode]
    texts += [percent(row[name]) for name in ("kept", "score", "agreement")]
    texts += [f"{row['first_token_ms']:.1f} ms", token]
    return [f"<td>{html.escape(text)}</td>" for text in texts]


def _figure(figure: Any, caption: str) -> str:
    """A matplotlib figure as inline SVG."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{caption}</figcaption></figure>"


def _subplots(num_rows: int, num_columns: int, width: float, height: float, **more: Any) -> Any:
    """A figure and its axes [num_rows][num_columns], without matplotlib's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **more)


def _quality(rows: Sequence[dict[str, Any]]) -> Any:
    """Score against kept fraction, one line per policy, one panel per mode."""
    modes = [mode for mode in (AWARE, AGNOSTIC) if any(_is(row, mode) for row in rows)]
    figure, axes = _subplots(1, len(modes), 4.5 * len(modes), 4.5, sharey=True)
    policies = list(dict.fromkeys(row["setup"].split("@")[0] for row in rows))
    full = next((row for row in rows if row["setup"] == FULL), None)
    for axis, mode in zip(axes[0], modes, strict=True):
        for number, policy in enumerate(p for p in policies if p != FULL):
            line = sorted(
                (100 * row["kept"], 100 * row["score"])
                for row in rows
                if _is(row, mode) and row["setup"].split("@")[0] == policy
            )
            if not line:
                continue
            marker = "osD^vPX*<>"[number % 10]
            axis.plot(*zip(*line, strict=True), marker=marker, markersize=5, label=policy)
        if full is not None:
            axis.axhline(100 * full["score"], color="black", linestyle="--", linewidth=1)
        axis.set(title=mode, xlabel="resident tokens, % of the prompt", ylim=(-2, 103))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("score, %")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _is(row: dict[str, Any], mode: str) -> bool:
    return bool(row["setup"] != FULL and row["mode"] == mode)


def _depths(rows: Sequence[dict[str, Any]]) -> Any:
    """One small map per setup and mode: lengths by depths."""
    maps = [(row, row["depths"]) for row in rows if row["depths"]]
    lengths = list(maps[0][1])
    figure, axes = _grid(len(maps), 0.5 + 0.3 * len(lengths))
    for axis, (row, depths) in zip(axes, maps, strict=False):
        values = [[_or_nan(score) for score in depths[length]] for length in lengths]
        picture = axis.imshow(values, vmin=0, vmax=1, cmap="RdYlBu", aspect="auto")
        axis.set_title(_title(row), fontsize=7)
        axis.set_xticks([-0.5, DEPTHS / 2 - 0.5, DEPTHS - 0.5], ["0", "depth", "1"], fontsize=6)
        axis.set_yticks(range(len(lengths)), lengths, fontsize=6)
    figure.colorbar(picture, ax=list(axes), label="score", shrink=0.6)
    return figure


def _heads(rows: Sequence[dict[str, Any]]) -> Any:
    """One small map per setup and mode: layers by heads, as a share of the mean budget."""
    maps = [row for row in rows if row["kept_tokens"]]
    figure, axes = _grid(len(maps), 1.3)
    for axis, row in zip(axes, maps, strict=False):
        tokens = row["kept_tokens"]
        mean = sum(map(sum, tokens)) / sum(map(len, tokens))
        share = [[head / mean for head in layer] for layer in tokens]
        picture = axis.imshow(share, vmin=0, vmax=2, cmap="viridis", aspect="auto")
        axis.set_title(f"{_title(row)}\nmean {mean:.0f} tokens", fontsize=7)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(picture, ax=list(axes), label="tokens, mean = 1", shrink=0.6)
    return figure


def _grid(num_maps: int, height: float) -> Any:
    """A figure with room for so many small maps, four in a row, and their axes."""
    columns = min(4, num_maps)
    num_rows = -(-num_maps // columns)
    figure, axes = _subplots(num_rows, columns, 9, 0.3 + height * num_rows)
    flat = list(axes.flatten())
    for axis in flat[num_maps:]:
        axis.set_visible(False)
    return figure, flat


def _title(row: dict[str, Any]) -> str:
    return row["setup"] if row["setup"] == FULL else f"{row['setup']}\n{row['mode']}"


def _or_nan(score: float | None) -> float:
    return float("nan") if score is None else score
