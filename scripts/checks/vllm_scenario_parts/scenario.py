"""Scenarios, the server that they ask, and how answers are compared."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai

MODEL = "scenarios"
# 200 tokens, one per character: enough for an event where the server compresses.
LONG = "".join(chr(33 + (7 * i * i + 3 * i) % 90) for i in range(200))
SHORT = "What is an LLM?"  # no prompt of this length is compressed


@dataclass
class Server:
    """A running server, and vLLM's API as clients see it.

    Attributes:
        address: such as http://127.0.0.1:8000.
        client: OpenAI's.
    """

    address: str
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(
            base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=300
        )

    def complete(self, prompt: Any = LONG, **more: Any) -> Any:
        """Asks for a completion, greedy by default; passes vLLM's own fields as `extra_body`."""
        return self.client.completions.create(
            **_sorted_out({"prompt": prompt, "temperature": 0, "max_tokens": 8, **more})
        )

    def chat(self, content: Any = LONG, **more: Any) -> Any:
        """Asks for a chat of one message, or of `messages`; see `complete`."""
        messages = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(
            **_sorted_out({"messages": messages, "temperature": 0, "max_tokens": 8, **more})
        )

    def refuses(self, ask: Callable[..., Any], **more: Any) -> str:
        """Returns the type of the error with HTTP 400, or of the error in a stream."""
        try:
            answer = ask(**more)
            if more.get("stream"):
                list(answer)
        except openai.APIError as error:
            refusal: Any = error
        else:
            raise AssertionError(f"expected a refusal of {more}, got an answer")
        if not isinstance(refusal, openai.APIStatusError):
            return f"in the stream: {type(refusal).__name__}"
        assert isinstance(refusal, openai.BadRequestError), refusal
        assert isinstance(refusal.body, dict)
        assert refusal.body["message"]
        return str(refusal.body["type"])

    def get(self, path: str, **body: Any) -> tuple[int, str]:
        """Returns status and text of a page, or of the answer to a posted body."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


_OF_OPENAI = (
    *("prompt", "messages", "temperature", "max_tokens", "max_completion_tokens", "n", "stop"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "seed", "logit_bias"),
    *("tools", "tool_choice", "response_format", "top_p", "presence_penalty", "user"),
    *("frequency_penalty", "extra_headers"),
)


def _sorted_out(settings: dict[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in settings.items() if name in _OF_OPENAI}
    rest = {name: value for name, value in settings.items() if name not in _OF_OPENAI}
    return {"model": MODEL, **known, "extra_body": rest}


@dataclass(frozen=True)
class Scenario:
    """One of vLLM's tests, or several that ask the same.

    Attributes:
        file: of vLLM's repository.
        tests: names there.
        run: what happens; it fails by an AssertionError, and returns what was said, as JSON.
    """

    file: str
    tests: tuple[str, ...]
    run: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """The scenario's own name."""
        return self.run.__name__


Registry = list[Scenario]


def like(
    registry: Registry, file: str, *tests: str
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Adds a function to the scenarios, and says which tests of vLLM's it follows."""

    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        registry.append(Scenario(file, tests, run))
        return run

    return add


def difference(one: Any, other: Any, where: str = "") -> str:
    """Returns where two answers differ; numbers may by 0.001, since batches round differently."""
    if isinstance(one, float) and isinstance(other, float):
        return "" if abs(one - other) <= 1e-3 else f"{where}: {one} and {other}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(f"{where}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other else f"{where}: {one!r} and {other!r}"
    return next((place for at, a, b in pairs if (place := difference(a, b, at))), "")
