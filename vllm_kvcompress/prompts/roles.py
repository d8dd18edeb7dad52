"""Which tokens of a chat's prompt come from its system messages and tools.

A text's tokens are those that change when the text changes: the prompt is rendered once more with
another text in its place, and what both renderings begin and end with is not the text's.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterator
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.plan import Spans

SYSTEM, TOOLS = "system", "tools"
ROLES = (SYSTEM, TOOLS)
MAX_MESSAGES = 8  # that are looked for; each is one more rendering
_SYSTEM_ROLES = ("system", "developer")

Render = Callable[[dict[str, Any]], Awaitable[list[int] | None]]


class RoleTokens(NamedTuple):
    """Tokens of a chat's prompt.

    Attributes:
        spans: those of the roles.
        num_tokens: all.
    """

    spans: Spans
    num_tokens: int


async def find_role_tokens(
    body: dict[str, Any], roles: tuple[str, ...], render: Render
) -> RoleTokens | None:
    """Finds the tokens of some roles; None: the request has none, or vLLM refuses it.

    Args:
        body: the request.
        roles: of `ROLES`.
        render: returns a request's prompt as token ids; None: vLLM refuses the request.

    Raises:
        ConfigError: the chat template renders the same request differently each time, or there are
            too many messages.
    """
    changed = list(_with_other_texts(body, roles))
    tokens = await render(body) if changed else None
    if tokens is None:
        return None
    if len(changed) > MAX_MESSAGES:
        raise ConfigError(
            f"--kv-protect {','.join(roles)}: expected at most {MAX_MESSAGES} such messages in a "
            f"chat, found {len(changed)}; join them, or name tokens with kv_protect yourself on a "
            "server without --kv-protect."
        )
    spans = []
    for other_body in changed:
        other = await render(other_body)
        if other is not None and other != tokens:
            spans.append(_difference(tokens, other))
    if await render(body) != tokens:
        raise ConfigError(
            f"--kv-protect {','.join(roles)}: expected a chat template that renders the same "
            "messages to the same tokens, found two renderings that differ; take what changes (a "
            "time, for example) out of the template."
        )
    return RoleTokens(joined(spans), len(tokens))


def joined(spans: list[tuple[int, int]]) -> Spans:
    """Sorts spans, and joins those that touch or overlap."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return tuple(result)


def _with_other_texts(body: dict[str, Any], roles: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yields the request with one text of the roles changed, for each of them."""
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict) or SYSTEM not in roles:
            continue
        if message.get("role") in _SYSTEM_ROLES and message.get("content"):
            changed = copy.deepcopy(body)
            changed["messages"][index]["content"] = _other(message["content"])
            yield changed
    if TOOLS in roles and body.get("tools"):
        yield {key: body[key] for key in body if key not in ("tools", "tool_choice")}


def _other(content: Any) -> Any:
    """Returns another text, with another first and another last character."""
    if isinstance(content, list):
        return [
            {**part, "text": _other(part["text"])}
            if isinstance(part, dict) and part.get("text")
            else part
            for part in content
        ]
    text = str(content).strip()
    return next(letter for letter in "xyz" if letter not in (text[:1], text[-1:]))


def _difference(tokens: list[int], other: list[int]) -> tuple[int, int]:
    """Returns the span of tokens between what both begin and end with.

    Where tokens could belong to either side of what was left out, the span has them all.
    """
    num_first = sum(takewhile(bool, map(eq, tokens, other)))
    num_last = sum(takewhile(bool, map(eq, reversed(tokens), reversed(other))))
    shorter = min(len(tokens), len(other))
    return min(num_first, shorter - num_last), len(tokens) - min(num_last, shorter - num_first)
