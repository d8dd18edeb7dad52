"""Asks a running server through the client libraries that people have.

    pip install openai litellm mcp langchain-openai      # in an environment of its own
    python scripts/checks/clients.py http://127.0.0.1:8000/v1 MODEL

A chat, the same streamed, an answer in a JSON schema, and a call of a tool, each with a prompt that
is long enough to be compressed. Status 1 where an answer is not what it should be. The server
needs `--enable-auto-tool-choice --tool-call-parser hermes`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
    },
    "required": ["city", "year"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "visit", "schema": SCHEMA}}
TEXT = "The river runs through the town, and the town is old. " * 60
MESSAGES = [{"role": "user", "content": f"{TEXT}\nWhich city, and in which year?"}]
SETTINGS = {"temperature": 0, "max_tokens": 128}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "book_visit", "parameters": SCHEMA, "strict": True},
}
CHOICE = {"type": "function", "function": {"name": "book_visit"}}


@dataclass(frozen=True)
class Check:
    """One library: an answer, the same streamed, one in the schema, and a call of the tool."""

    name: str
    chat: Callable[[], str]
    stream: Callable[[], str]
    schema: Callable[[], Any]
    tool: Callable[[], tuple[str, Any]]


def with_openai(address: str, model: str) -> Check:
    """Makes requests with OpenAI's library."""
    import openai

    client: Any = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    ask = partial(client.chat.completions.create, model=model, **SETTINGS)
    return _as_openai(f"openai {openai.__version__}", ask)


def with_litellm(address: str, model: str) -> Check:
    """Makes requests with LiteLLM."""
    import litellm

    where = {"api_base": address, "api_key": "none", "model": f"openai/{model}"}
    return _as_openai(
        f"litellm {version('litellm')}", partial(litellm.completion, **where, **SETTINGS)
    )


def _as_openai(name: str, ask: Callable[..., Any]) -> Check:
    """Makes requests with a library whose answers have the form of OpenAI's."""

    def message(**more: Any) -> Any:
        return ask(messages=MESSAGES, **more).choices[0].message

    def streamed() -> str:
        parts = ask(messages=MESSAGES, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    def tool() -> tuple[str, Any]:
        call = message(tools=[TOOL], tool_choice=CHOICE).tool_calls[0].function
        return call.name, json.loads(call.arguments)

    return Check(
        name,
        chat=lambda: message().content,
        stream=streamed,
        schema=lambda: json.loads(message(response_format=FORMAT).content),
        tool=tool,
    )


def with_langchain(address: str, model: str) -> Check:
    """Makes requests with LangChain."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=address, api_key="none", model=model, max_retries=0, **SETTINGS)
    prompt = MESSAGES[0]["content"]

    def tool() -> tuple[str, Any]:
        call = chat.bind_tools([TOOL], tool_choice=CHOICE).invoke(prompt).tool_calls[0]
        return call["name"], call["args"]

    return Check(
        f"langchain-openai {version('langchain-openai')}",
        chat=lambda: str(chat.invoke(prompt).content),
        stream=lambda: "".join(str(part.content) for part in chat.stream(prompt)),
        schema=lambda: json.loads(str(chat.bind(response_format=FORMAT).invoke(prompt).content)),
        tool=tool,
    )


def failures(check: Check) -> Iterator[str]:
    """Sends the four requests through one library, and yields what is wrong."""
    text = check.chat()
    if not text or check.stream() != text:
        yield f"{check.name}: the stream says something else"
    try:
        answer = check.schema()
        if not in_schema(answer):
            yield f"{check.name}: not in the schema, {answer}"
        tool, answer = check.tool()
        if tool != TOOL["function"]["name"] or not in_schema(answer):
            yield f"{check.name}: no call of the tool, {tool}({answer})"
    except ValueError as error:
        yield f"{check.name}: no JSON, {error}"
    print(f"{check.name}: chat, stream, JSON schema, tool", flush=True)


def in_schema(answer: Any) -> bool:
    """Returns whether an answer fits `SCHEMA`."""
    return sorted(answer) == ["city", "year"] and isinstance(answer["year"], int)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address")
    parser.add_argument("model")
    arguments = parser.parse_args()
    problems = []
    for library in (with_openai, with_litellm, with_langchain):
        problems += list(failures(library(arguments.address, arguments.model)))
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
