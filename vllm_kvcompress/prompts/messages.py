"""Which texts of a chat request may be shortened, and which role each has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_SAME_AS = {"developer": "system", "function": "tool"}
_SPEAKERS = ("user", "assistant", "tool", "system")


@dataclass(frozen=True)
class Slot:
    """Text in a request.

    Attributes:
        holder, key: the container and the key of the text in it.
        parts: parts of the text, each with its role; None: separates two parts, and is kept.
    """

    holder: Any
    key: Any
    parts: tuple[tuple[str | None, str], ...]


def slots(body: dict[str, Any]) -> Iterator[Slot]:
    """Yields every text of a chat request that could be shortened, in order.

    Left out: images and other parts, tool calls, reasoning, and a last message of the assistant,
    which the model continues. The question is the last text part of the last user turn, or, if it
    is the only one, its last paragraph.
    """
    messages = body.get("messages")
    messages = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    users = [m for m in messages if m.get("role") == "user"]
    if messages and messages[-1].get("role") == "assistant":
        messages.pop()
    for message in messages:
        role = _SAME_AS.get(str(message.get("role")), str(message.get("role")))
        texts = list(_texts(message)) if role in _SPEAKERS else []
        asks = bool(users) and message is users[-1]
        for index, (holder, key) in enumerate(texts):
            parts: tuple[tuple[str | None, str], ...] = ((role, holder[key]),)
            if asks and index == len(texts) - 1:
                parts = _with_question(holder[key]) if index == 0 else (("question", holder[key]),)
            yield Slot(holder, key, parts)
    for tool in body["tools"] if isinstance(body.get("tools"), list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("description"), str):
            yield Slot(function, "description", (("tools", function["description"]),))


def _texts(message: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields container and key of each text of a message."""
    content = message.get("content")
    if isinstance(content, str):
        yield message, "content"
    for part in content if isinstance(content, list) else []:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if is_text and isinstance(part.get("text"), str):
            yield part, "text"


def _with_question(text: str) -> tuple[tuple[str | None, str], ...]:
    """Splits a user's text into the question, its last paragraph, and what comes before."""
    body = text.rstrip()
    breaks = [match.span() for match in _BLANK_LINE.finditer(body)]
    if not breaks:
        return (("question", text),)
    start, end = breaks[-1]
    return (("user", text[:start]), (None, text[start:end]), ("question", text[end:]))
