"""Tokens of system messages and tools, found through a template's own rendering."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.roles import MAX_MESSAGES, ROLES, find_role_tokens, joined

TEXTS = st.text("abxyz <>|", min_size=1, max_size=12).filter(str.strip)


def rendered(body: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Renders a chat, one token per character, and notes where protected texts lie."""
    text, places = "", []
    if body.get("tools"):
        start = len(text)
        text += f"<tools>{body['tools']}</tools>"
        places.append((start, len(text)))
    for message in body["messages"]:
        text += f"<{message['role']}>"
        content = message["content"]
        parts = [part["text"] for part in content] if isinstance(content, list) else [content]
        core = "".join(parts).strip()
        if message["role"] in ("system", "developer"):
            places.append((len(text), len(text) + len(core)))
        text += f"{core}<end>"
    return text, places


async def render(body: dict[str, Any]) -> list[int]:
    return list(map(ord, rendered(body)[0]))


def found(body: dict[str, Any], roles: tuple[str, ...] = ROLES, how: Any = render) -> Any:
    return asyncio.run(find_role_tokens(body, roles, how))


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), other=TEXTS, before=st.booleans())
def test_spans_are_exactly_the_texts(texts: list[str], other: str, before: bool) -> None:
    """Whatever the messages say, also where they look like the template."""
    messages = [{"role": "system", "content": text} for text in texts]
    messages.insert(0 if before else len(messages), {"role": "user", "content": other})
    body = {"messages": messages}
    text, places = rendered(body)
    assert found(body) == (tuple(places), len(text))
    assert found(body, ("tools",)) is None


@given(TEXTS, TEXTS)
def test_tools_and_developers_are_found(text: str, other: str) -> None:
    """The tools' span has all that comes with them, and what surrounds it may belong to it."""
    parts = [{"type": "text", "text": text}]
    body = {
        "messages": [{"role": "developer", "content": parts}, {"role": "user", "content": other}],
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
    }
    rendering, places = rendered(body)
    spans, num_tokens = found(body)
    assert num_tokens == len(rendering)
    assert {*range(*places[0]), *range(*places[1])} <= {t for span in spans for t in range(*span)}
    assert sum(end - start for start, end in spans) <= sum(b - a for a, b in places) + 1


def test_what_has_no_roles_is_not_rendered() -> None:
    async def never(body: dict[str, Any]) -> list[int]:
        raise AssertionError(body)

    for body in ({}, {"messages": "no"}, {"messages": [3, {"role": "user", "content": "x"}]}):
        assert found(body, how=never) is None


def test_a_template_that_changes_is_refused() -> None:
    times = iter(range(100))

    async def dated(body: dict[str, Any]) -> list[int]:
        return [next(times), *await render(body)]

    with pytest.raises(ConfigError, match="two renderings that differ"):
        found({"messages": [{"role": "system", "content": "a"}]}, how=dated)


def test_too_many_messages_are_refused() -> None:
    messages = [{"role": "system", "content": "a"}] * (MAX_MESSAGES + 1)
    with pytest.raises(ConfigError, match="at most 8 such messages in a chat, found 9"):
        found({"messages": messages})


def test_what_vllm_refuses_is_left_to_it() -> None:
    async def refuses(body: dict[str, Any]) -> None:
        return None

    assert found({"messages": [{"role": "system", "content": "a"}]}, how=refuses) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5))
def test_joined_spans_have_the_same_tokens(spans: list[tuple[int, int]]) -> None:
    result = joined(spans)
    tokens = {token for start, end in spans for token in range(start, end)}
    assert {token for start, end in result for token in range(start, end)} == tokens
    assert all(one[1] < other[0] for one, other in pairwise(result))
