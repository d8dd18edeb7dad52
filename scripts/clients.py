"""Asks a running server through the client libraries that people have.

    pip install openai litellm langchain-openai      # in an environment of its own
    python scripts/clients.py http://127.0.0.1:8000/v1 MODEL

A chat, the same streamed, and an answer in a JSON schema, each with a prompt that is long enough to
be compressed. Status 1 where an answer is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
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
SETTINGS = {"temperature": 0, "max_tokens": 64}
Check = tuple[str, Callable[[], str], Callable[[], str], Callable[[], str]]


def with_openai(address: str, model: str) -> Check:
    """OpenAI's own."""
    import openai

    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)

    def ask(**more: Any) -> Any:
        create: Any = client.chat.completions.create
        return create(model=model, messages=MESSAGES, **SETTINGS, **more)

    def streamed() -> str:
        return "".join(c.choices[0].delta.content or "" for c in ask(stream=True) if c.choices)

    return (
        f"openai {openai.__version__}",
        lambda: ask().choices[0].message.content,
        streamed,
        lambda: ask(response_format=FORMAT).choices[0].message.content,
    )


def with_litellm(address: str, model: str) -> Check:
    """LiteLLM's."""
    from importlib.metadata import version

    import litellm

    def ask(**more: Any) -> Any:
        where = {"api_base": address, "api_key": "none", "model": f"hosted_vllm/{model}"}
        return litellm.completion(messages=MESSAGES, **where, **SETTINGS, **more)

    def streamed() -> str:
        return "".join(c.choices[0].delta.content or "" for c in ask(stream=True) if c.choices)

    return (
        f"litellm {version('litellm')}",
        lambda: ask().choices[0].message.content,
        streamed,
        lambda: ask(response_format=FORMAT).choices[0].message.content,
    )


def with_langchain(address: str, model: str) -> Check:
    """LangChain's."""
    from importlib.metadata import version

    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=address, api_key="none", model=model, max_retries=0, **SETTINGS)
    prompt = MESSAGES[0]["content"]
    return (
        f"langchain-openai {version('langchain-openai')}",
        lambda: str(chat.invoke(prompt).content),
        lambda: "".join(str(part.content) for part in chat.stream(prompt)),
        lambda: str(chat.bind(response_format=FORMAT).invoke(prompt).content),
    )


def failures(checks: Check) -> Iterator[str]:
    """What is not as it should be, of one library."""
    name, chat, stream, schema = checks
    whole = chat()
    if not whole or stream() != whole:
        yield f"{name}: the stream says something else"
    answer = schema()
    try:
        found = json.loads(answer)
        if sorted(found) != ["city", "year"] or not isinstance(found["year"], int):
            yield f"{name}: not in the schema, {answer}"
    except ValueError:
        yield f"{name}: no JSON, {answer}"
    print(f"{name}: chat, stream, JSON schema", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address")
    parser.add_argument("model")
    arguments = parser.parse_args()
    found = []
    for library in (with_openai, with_litellm, with_langchain):
        found += list(failures(library(arguments.address, arguments.model)))
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
