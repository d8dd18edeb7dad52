"""Defines the loads: which requests come when, and how much memory there is for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.tools.benchmark.shapes import VOCABULARY

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Arrival:
    """One request of a load.

    Attributes:
        name: unique in the load.
        tokens: its prompt, or what it adds to the conversation that it continues.
        max_tokens: number of tokens that it generates.
        seconds: when it arrives, from the start.
        follows: the request whose prompt and reply it continues, once that has ended.
    """

    name: str
    tokens: list[int]
    max_tokens: int
    seconds: float = 0.0
    follows: str | None = None


@dataclass(frozen=True)
class Load:
    """One repetition of a scenario.

    Attributes:
        arrivals: makes the requests of a repetition, from its random generator.
        pool_tokens: tokens that fit the KV cache.
        max_model_len: longest request.
        settings: changes of the user's settings.
        engine: further options of both engines.
        timed_attention: also time attention, which needs eager mode.
    """

    arrivals: Callable[[random.Random], list[Arrival]]
    pool_tokens: int
    max_model_len: int
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    timed_attention: bool = False

    @property
    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`."""
        return {
            "block_size": BLOCK_SIZE,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            # One block of every pool is vLLM's null block.
            "num_gpu_blocks_override": self.pool_tokens // BLOCK_SIZE + 1,
            "max_model_len": self.max_model_len,
            **self.engine,
        }


@dataclass(frozen=True)
class Size:
    """How large the loads are.

    Attributes:
        requests: number of requests.
        prompt: tokens of a prompt.
        output: tokens that each request generates.
    """

    requests: int = 32
    prompt: int = 4096
    output: int = 256


def pool_limited(size: Size) -> Load:
    """Many requests at once, and memory for four that are not compressed."""
    longest = _blocks(size.prompt + size.output)
    return Load(_at_once(size), pool_tokens=4 * longest, max_model_len=longest)


def long_decode(size: Size) -> Load:
    """One request that generates after a long context, with enough memory."""
    longest = _blocks(size.prompt + size.output)
    return Load(
        _at_once(replace(size, requests=1)),
        pool_tokens=2 * longest,
        max_model_len=longest,
        timed_attention=True,
    )


def oversize(size: Size) -> Load:
    """A prompt four times longer than the pool.

    It is compressed every few tokens, down to a twelfth, because before an event's sources are
    freed they and what it keeps are both held.
    """
    chunk = max(BLOCK_SIZE, size.prompt // 64 // BLOCK_SIZE * BLOCK_SIZE)
    return Load(
        _at_once(replace(size, requests=1)),
        pool_tokens=size.prompt // 4,
        max_model_len=_blocks(size.prompt + size.output),
        settings={"trigger": f"chunk:{chunk}", "budget": 1 / 12},
    )


def long_answers(size: Size) -> Load:
    """Answers eight times as long as their prompts, and memory for an eighth of the requests.

    Nothing but a ceiling compresses: 2/9 of a whole request, 1,024 tokens of 4,608.
    """
    longest = _blocks(size.prompt + size.output)
    return Load(
        _at_once(size),
        pool_tokens=max(1, size.requests // 8) * longest,
        max_model_len=longest,
        settings={"ceiling": longest * 2 // 9, "budget": 1.0, "trigger": "prompt"},
    )


def chat(size: Size) -> Load:
    """Conversations of six turns that share a system prompt; each turn reads all before it."""
    turns, system = 6, size.prompt // 4
    new = (size.prompt - system) // turns - size.output // 4
    conversations = max(1, size.requests // 8)
    longest = system + turns * (new + size.output // 4)

    def arrivals(draw: random.Random) -> list[Arrival]:
        shared, requests = _tokens(draw, system), []
        for c in range(conversations):
            for turn in range(turns):
                tokens = _tokens(draw, new) if turn else shared + _tokens(draw, new)
                former = f"c{c}t{turn - 1}" if turn else None
                requests.append(Arrival(f"c{c}t{turn}", tokens, size.output // 4, follows=former))
        return requests

    return Load(
        arrivals, pool_tokens=2 * conversations * _blocks(longest), max_model_len=_blocks(longest)
    )


def chat_crowded(size: Size) -> Load:
    """Twice as many conversations as `chat`, taking turns, and memory for a quarter of them."""
    load = chat(replace(size, requests=2 * size.requests))
    room = _blocks(max(load.pool_tokens // 8, 3 * load.max_model_len // 2))
    return replace(load, pool_tokens=room)


def off(size: Size) -> Load:
    """Compression switched off: what the installed extension itself costs."""
    load = pool_limited(replace(size, requests=max(4, size.requests // 4)))
    return replace(load, settings={"policy": "none", "budget": 1.0})


def mixed(size: Size) -> Load:
    """Requests of all lengths, arriving at random, and memory for 2.5 of the longest."""
    longest = size.prompt + size.output

    def arrivals(draw: random.Random) -> list[Arrival]:
        requests, now = [], 0.0
        for n in range(size.requests):
            now += draw.expovariate(1.0) * size.prompt / 16384
            length = int(size.prompt * draw.choice((1 / 16, 1 / 4, 1 / 2, 1)))
            generated = int(size.output * draw.choice((1 / 4, 1 / 2, 1)))
            requests.append(Arrival(f"r{n}", _tokens(draw, length), generated, seconds=now))
        return requests

    return Load(arrivals, pool_tokens=_blocks(5 * longest // 2), max_model_len=_blocks(longest))


SCENARIOS: dict[str, Callable[[Size], Load]] = {
    "pool": pool_limited,
    "long-decode": long_decode,
    "oversize": oversize,
    "long-answers": long_answers,
    "chat": chat,
    "chat-crowded": chat_crowded,
    "off": off,
    "mixed": mixed,
}
SIZES = {
    "long-decode": Size(requests=1, prompt=32768, output=64),
    "oversize": Size(requests=1, prompt=16384, output=64),
    "long-answers": Size(requests=64, prompt=512, output=4096),
}


def _at_once(size: Size) -> Callable[[random.Random], list[Arrival]]:
    """Requests that all arrive at the start."""

    def arrivals(draw: random.Random) -> list[Arrival]:
        return [
            Arrival(f"r{n}", _tokens(draw, size.prompt), size.output) for n in range(size.requests)
        ]

    return arrivals


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def _blocks(tokens: int) -> int:
    """A number of tokens, rounded up to full blocks."""
    return ceil_div(tokens, BLOCK_SIZE) * BLOCK_SIZE
