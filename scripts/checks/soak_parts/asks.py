"""Requests of a soak run, and their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ask:
    """A request of the schedule.

    Attributes:
        index: its number in the schedule.
        prompt: token ids.
        max_tokens: of its answer.
        stream: the answer comes as it is made (a server alone).
        chat: the prompt is a message (a server alone).
        xargs: what it says of its compression.
        cache_salt: whose cache it shares.
        guide: what its answer has to look like.
        n: answers.
        stop: texts that end an answer.
        logprobs, prompt_logprobs: as of vLLM's `SamplingParams`.
        temperature: 0 (greedy) or 1.
        cut: its client leaves after so many parts of the answer (of the engine's steps).
        refused: it is one that has to be refused.
        alone: it is asked again alone, and says the same.
        secrets: words that its prompt alone has among those of its tenant.
        foreign: words of the other tenant.
    """

    index: int
    prompt: list[int]
    max_tokens: int
    stream: bool = False
    chat: bool = False
    xargs: dict[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    guide: dict[str, Any] | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temperature: float = 0.0
    cut: int | None = None
    refused: bool = False
    alone: bool = False
    secrets: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


@dataclass
class Choice:
    """One choice of an answer.

    Attributes:
        text: of it.
        tokens: its ids, where they are known.
        reason: why it ended.
        logprobs: by token the log-probability of the token itself, and of the best others.
    """

    text: str
    tokens: list[int]
    reason: str | None
    logprobs: list[dict[int, float]] | None = None


@dataclass
class Answer:
    """How a request ended.

    Attributes:
        outcome: answered, refused, cut or failed.
        choices: if it was answered.
        reason: why it was refused or failed.
        cached: tokens of the prompt that were not read.
    """

    outcome: str
    choices: list[Choice] = field(default_factory=list)
    reason: str = ""
    cached: int = 0


@dataclass
class Batch:
    """Requests that are served together.

    Attributes:
        asks: in the order in which they come.
        seed: of when they come.
        concurrency: how many may be there at a time.
    """

    asks: list[Ask]
    seed: str
    concurrency: int


@dataclass
class Served:
    """The answers to a batch, and the server's counts.

    Attributes:
        answers: by number of the request.
        counts: steps, events and the like, by name.
        left_over: what is wrong once all requests have ended; empty: nothing.
        rss: bytes of memory that the processes have.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    left_over: str = ""
    rss: int = 0
