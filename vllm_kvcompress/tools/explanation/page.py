"""Writes what a request's heads keep as one HTML file without scripts or links."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.ledger import SKIP_REASONS

Heads = list[tuple[int, int, list[int]]]  # layer, KV head, and the positions that it holds

_LEVELS = 10  # of shades: 0 for no head, the last for all heads
_NO_TRIGGER = (
    "no trigger asked for it: the policy is none or the budget 1.0, the answer was too short for "
    "decode:N, or under pressure there was room"
)


def html_page(
    explanation: dict[str, Any], layer: int | None = None, head: int | None = None
) -> str:
    """Returns the page of what `explain` returned, with `model` and `settings` beside it.

    The text is shaded by the KV heads of one `layer`, those numbered `head`, or all (None).

    Raises:
        ConfigError: the model has no such heads.
    """
    heads = [
        (number["layer"], index, positions)
        for number in explanation["held"]
        for index, positions in enumerate(number["heads"])
    ]
    chosen = [each for each in heads if layer in (None, each[0]) and head in (None, each[1])]
    if heads and not chosen:
        raise ConfigError(
            f"--layer {layer}, --head {head}: expected one of layers "
            f"{', '.join(map(str, dict.fromkeys(each[0] for each in heads)))} and a KV head up to "
            f"{max(each[1] for each in heads)}; give these, or leave both out."
        )
    settings = [(name, str(value)) for name, value in explanation["settings"].items()]
    sections = {
        "Prompt": _text(explanation, chosen, "prompt"),
        "Answer": _text(explanation, chosen, "answer"),
        "Tokens kept by layer and KV head": _table_of_heads(explanation),
        "Where they lie": _strips(heads, explanation["compressed_tokens"]),
        "Events": _events(explanation["events"]),
        "Settings": f'<div id="settings">{_table([("setting", "value"), *settings])}</div>',
    }
    body = f"<h1>What the KV heads of {html.escape(explanation['model'])} keep of a request</h1>"
    body += _summary(explanation, heads, chosen)
    body += "".join(f"<h2>{title}</h2>{part}" for title, part in sections.items() if part)
    page = Template(Path(__file__).with_suffix(".html").read_text())
    return page.substitute(title="Kept tokens of a request", body=body)


def why_whole(explanation: dict[str, Any]) -> str | None:
    """Returns why a request was not compressed; None: it was."""
    if explanation["events"]:
        return None
    reasons = [f"{SKIP_REASONS[reason]} ({reason})" for reason in explanation["skipped"]]
    return "; ".join(reasons) or _NO_TRIGGER


def _summary(explanation: dict[str, Any], heads: Heads, chosen: Heads) -> str:
    """Returns what was kept in one sentence, or why all was, and the legend."""
    num_prompt = len(explanation["prompt_tokens"])
    reason = why_whole(explanation)
    if reason is not None:
        text = f"Not compressed: {reason}. Every head holds all {num_prompt} tokens of the prompt."
        return f'<p class="why">{html.escape(text)}</p>'
    end = explanation["compressed_tokens"]
    mean = fmean(len(positions) for _, _, positions in heads)
    first = ""
    if explanation["events"][0]["position"] == num_prompt:
        first = " The answer's first token comes from the whole prompt."
    shades = "".join(
        f'<span class="k{level}">{text}</span> '
        for level, text in ((0, "no head"), (_LEVELS // 2, "half"), (_LEVELS, "all"))
    )
    return (
        f"<p>Of the first {end} tokens, which lie in full blocks, a KV head keeps {mean:.1f} in "
        f"the mean over {len(heads)} heads; later tokens are held by all.{first}</p>"
        f'<p class="legend">Shade: how many of {len(chosen)} KV heads hold a token: {shades} '
        'Underlined: always kept, <span class="sink">first</span> '
        '<span class="recent">latest</span> <span class="protected">protected by the request'
        "</span>. Hold the pointer over a token for its number.</p>"
    )


def _text(explanation: dict[str, Any], chosen: Heads, part: str) -> str:
    """Returns the shaded text of the prompt or the answer."""
    begin = 0 if part == "prompt" else len(explanation["prompt_tokens"])
    counts = Counter(place for _, _, positions in chosen for place in positions)
    end, spans = explanation["compressed_tokens"], []
    for num_tokens, text in explanation["pieces"][part]:
        places = range(begin, begin + num_tokens)
        held = [counts[place] if place < end else len(chosen) for place in places]
        kind = _kind(explanation, begin)
        shade = _level(sum(held), len(chosen) * num_tokens)
        is_break = "\n" in text and not text.strip()
        names = " ".join(filter(None, (f"k{shade}", kind, "nl" if is_break else "")))
        counted = f"{', '.join(map(str, held))} of {len(chosen)}" if chosen else "kept whole"
        title = f"{_numbers(places)}: {counted}"
        escaped = html.escape(text).replace("\r", "&#13;")  # which browsers take for \n
        spans.append(f'<span class="{names}" title="{title}">{escaped}</span>')
        begin += num_tokens
    return f'<div class="text" id="{part}">{"".join(spans)}</div>'


def _kind(explanation: dict[str, Any], place: int) -> str:
    """Returns why a token is always kept; empty: the policy scored it."""
    if not explanation["events"]:
        return ""
    event = explanation["events"][-1]
    if any(start <= place < end for start, end in event["protected"]):
        return "protected"
    if place < event["num_sinks"]:
        return "sink"
    recent = event["position"] - event["num_recent"]
    return "recent" if place >= min(recent, event["compressed_tokens"]) else ""


def _level(number: int, most: int) -> int:
    """Returns a shade: `_LEVELS` only for all, 0 only for none of several."""
    if number in (0, most):
        return _LEVELS if number == most else 0
    return 1 + number * (_LEVELS - 1) // most


def _numbers(places: range) -> str:
    if len(places) == 1:
        return f"token {places[0]}"
    return f"tokens {places[0]} to {places[-1]}, one character"


def _table_of_heads(explanation: dict[str, Any]) -> str:
    """Returns the kept tokens of every head, shaded relative to those that were compressed."""
    layers, end, body = explanation["held"], explanation["compressed_tokens"], ""
    if not layers:
        return ""
    names = "".join(f"<th>head {head}</th>" for head in range(len(layers[0]["heads"])))
    for layer in layers:
        numbers = [len(positions) for positions in layer["heads"]]
        cells = "".join(f'<td class="k{_level(n, end)}">{n}</td>' for n in numbers)
        body += f"<tr><td>{layer['layer']}</td>{cells}<td>{fmean(numbers):.1f}</td></tr>"
    head = f"<tr><th>layer</th>{names}<th>mean</th></tr>"
    return f'<div class="scroll"><table class="heads">{head}{body}</table></div>'


def _strips(heads: Heads, num_tokens: int) -> str:
    """Returns a strip per head, from the first token to the last of the full blocks."""
    if not heads:
        return ""
    paths = "".join(
        f'<path d="{"".join(f"M{start} {row}h{length}" for start, length in _runs(positions))}">'
        f"<title>layer {layer}, head {head}: {len(positions)} tokens</title></path>"
        for row, (layer, head, positions) in enumerate(heads)
    )
    box = f'viewBox="0 -0.5 {num_tokens} {len(heads)}" preserveAspectRatio="none"'
    svg = f'<svg {box} height="{8 * len(heads)}" stroke-width="0.8">{paths}</svg>'
    caption = (
        "A row for each head, layer after layer from top to bottom; from left to right, the first "
        f"{num_tokens} tokens."
    )
    return f'{svg}<p class="caption">{caption}</p>'


def _runs(positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields start and length of runs of successive positions."""
    ordered = sorted(positions)
    breaks = [0, *(i for i in range(1, len(ordered)) if ordered[i] > ordered[i - 1] + 1)]
    for first, last in pairwise([*breaks, len(ordered)]):
        if first < last:
            yield ordered[first], last - first


def _events(events: Sequence[dict[str, Any]]) -> str:
    """Returns a table of the request's events."""
    names = ("policy", "trigger", "position", "source_tokens", "kept_tokens")
    titles = ("policy", "trigger", "after token", "tokens read per head", "kept in the mean")
    rows = [[str(event[name]) for name in names] for event in events]
    return _table([titles, *rows]) if rows else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first row is its head."""
    lines = [
        "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
        for tag, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True)
    ]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>{table}</table></div>'
