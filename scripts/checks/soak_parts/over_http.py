"""Clients of a server over HTTP: patient ones, streams, and ones that leave early."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections import defaultdict
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from soak_parts.asks import Answer, Ask, Batch, Choice
from soak_parts.models import text_of

_PATIENCE = aiohttp.ClientTimeout(total=600)


def read_metrics(address: str) -> dict[str, float]:
    """Returns the sums of a server's metrics, by name."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (family.name, f"{family.name}_total"):
                sums[family.name] += sample.value
    return sums


class Client:
    """Many clients of one server.

    Args:
        address: such as http://127.0.0.1:8000.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    async def serve(self, batch: Batch) -> dict[int, Answer]:
        """The answers to a batch, by number of the request."""
        door, rng = asyncio.Semaphore(batch.concurrency), random.Random(batch.seed)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=_PATIENCE) as session:

            async def one(ask: Ask) -> Answer:
                async with door:
                    try:
                        return await self._ask(session, ask)
                    except (aiohttp.ClientError, TimeoutError) as error:
                        return Answer("failed", reason=repr(error))

            tasks = []
            for ask in batch.asks:
                tasks.append(asyncio.create_task(one(ask)))
                await asyncio.sleep(rng.choice((0, 0, 0.003, 0.02)))
            answers = await asyncio.gather(*tasks)
        return {ask.index: answer for ask, answer in zip(batch.asks, answers, strict=True)}

    async def touch(self) -> None:
        """A request of one token."""
        body = {"model": "soak", "prompt": [5], "max_tokens": 1}
        url = f"{self._address}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
            await reply.read()

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask) -> Answer:
        """One request, which its client may leave."""
        path = "/v1/chat/completions" if ask.chat else "/v1/completions"
        post = session.post(self._address + path, json=body(ask))
        if ask.cut is not None and not ask.stream:
            try:
                async with asyncio.timeout(0.01 * ask.cut):
                    async with post as reply:
                        await reply.read()
            except TimeoutError:
                pass
            return Answer("cut")
        async with post as reply:
            if reply.status >= 400:
                return _error(reply.status, await reply.text())
            if not ask.stream:
                return _answer(ask, [json.loads(await reply.read())])
            parts: list[dict[str, Any]] = []
            async for line in reply.content:
                if len(parts) == ask.cut:
                    return Answer("cut")
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    parts.append(json.loads(line[6:]))
        return _answer(ask, parts)


def body(ask: Ask) -> dict[str, Any]:
    """Returns a request's JSON body: OpenAI's fields and vLLM's additions."""
    fields: dict[str, Any] = {
        "model": "soak",
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "n": ask.n,
        "stream": ask.stream,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": ask.xargs,
    }
    if ask.chat:
        fields["messages"] = [{"role": "user", "content": text_of(ask.prompt)}]
    else:
        fields["prompt"] = ask.prompt
    logprobs = 2 if ask.alone else ask.logprobs
    if logprobs is not None:
        of_chat = {"logprobs": True, "top_logprobs": logprobs}
        fields |= of_chat if ask.chat else {"logprobs": logprobs}
    optional = {
        "stop": ask.stop,
        "cache_salt": ask.cache_salt,
        "structured_outputs": ask.guide,
        "prompt_logprobs": None if ask.stream else ask.prompt_logprobs,
    }
    return fields | {name: value for name, value in optional.items() if value not in (None, [])}


def _error(status: int, text: str) -> Answer:
    """Makes an answer of an error, which a stream sends as its last part."""
    return Answer("refused" if status < 500 else "failed", reason=f"{status} {text[:300]}")


def _answer(ask: Ask, parts: list[dict[str, Any]]) -> Answer:
    """Joins the parts of a streamed reply, or reads an unstreamed one."""
    choices = [Choice("", [], None, []) for _ in range(ask.n)]
    for part in parts:
        if "error" in part:
            return _error(part["error"]["code"], str(part["error"]))
        for said in part["choices"]:
            choice = choices[said["index"]]
            message = said.get("message") or said.get("delta") or said
            choice.text += message.get("text") or message.get("content") or ""
            choice.tokens += said.get("token_ids") or []
            choice.reason = said.get("finish_reason") or choice.reason
            assert choice.logprobs is not None
            choice.logprobs += _logprobs(said.get("logprobs"))
    return Answer("answered", choices)


def _logprobs(said: dict[str, Any] | None) -> list[dict[int, float]]:
    """Returns for each token the log-probabilities by token id, from either API's form."""
    if not said:
        return []
    if "content" in said:
        return [
            {_id(each["token"]): each["logprob"] for each in (place, *place["top_logprobs"])}
            for place in said["content"] or ()
        ]
    own = zip(said["tokens"], said["token_logprobs"], strict=True)
    by_token = [{_id(token): logprob} for token, logprob in own]
    for place, best in zip(by_token, said["top_logprobs"] or (), strict=False):
        place |= {_id(token): logprob for token, logprob in (best or {}).items()}
    return by_token


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))
