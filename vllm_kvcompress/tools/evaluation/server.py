"""Asks a running server the questions of an evaluation."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.tools.evaluation.engine import Question, Reply, mean_nats


class Server:
    """Asks an OpenAI-compatible server; a context manager.

    What it keeps is read from its metrics, so nobody else should use it meanwhile. `model` is the
    name that it serves the model under.
    """

    def __init__(self, base_url: str, model: str) -> None:
        import openai

        self._address = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._client = openai.OpenAI(base_url=f"{self._address}/v1", api_key="none", max_retries=0)

    def __enter__(self) -> Server:
        self._counted()  # raises if the server is not there
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, *questions: Question) -> list[Reply]:
        """Replies to the questions, greedy, one after the other, since metrics count all requests.

        Raises:
            EngineError: the server refused a question, or is not there.
        """
        return [self._ask(question) for question in questions]

    def _ask(self, question: Question) -> Reply:
        import openai

        before = self._counted()
        try:
            reply = self._predict(question) if question.predicted else self._complete(question)
        except openai.OpenAIError as error:
            raise EngineError(f"{self._address}: {error}") from None
        return replace(reply, resident_tokens=reply.prompt_tokens - self._freed_since(before))

    def _complete(self, question: Question) -> Reply:
        """Streams what follows the prompt."""
        started = time.perf_counter()
        text, tokens, arrivals = "", list[int](), list[float]()
        extra = {"return_token_ids": True, "vllm_xargs": question.extra_args}
        for chunk in self._client.completions.create(
            **self._prompt(question), stream=True, extra_body=extra
        ):
            if chunk.choices:
                arrivals.append(time.perf_counter() - started)
                text += chunk.choices[0].text
                tokens += getattr(chunk.choices[0], "token_ids", None) or []
        return Reply(
            text=text,
            tokens=tokens,
            prompt_tokens=len(question.prompt),
            first_token_seconds=arrivals[0],
            token_seconds=(arrivals[-1] - arrivals[0]) / max(1, len(tokens) - 1),
            resident_tokens=0,
        )

    def _predict(self, question: Question) -> Reply:
        """Measures how well the prompt's end is predicted; vLLM does not stream prompt logprobs."""
        started = time.perf_counter()
        extra = {"prompt_logprobs": 0, "return_token_ids": True, "vllm_xargs": question.extra_args}
        done = self._client.completions.create(**self._prompt(question), extra_body=extra)
        choice: Any = done.choices[0]
        logprobs = [
            {int(token): said["logprob"] for token, said in (each or {}).items()}
            for each in choice.prompt_logprobs
        ]
        return Reply(
            text=choice.text,
            tokens=choice.token_ids,
            prompt_tokens=len(question.prompt),
            first_token_seconds=time.perf_counter() - started,
            token_seconds=0.0,
            resident_tokens=0,
            nats=mean_nats(logprobs, question),
        )

    def _prompt(self, question: Question) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }

    def _freed_since(self, before: tuple[float, float]) -> float:
        """Tokens per head that events have freed; waits for the metrics of the last step."""
        deadline = time.monotonic() + 5
        while (now := self._counted())[0] == before[0]:
            if time.monotonic() > deadline:
                raise EngineError(f"{self._address}/metrics: no request was counted as finished.")
            time.sleep(0.005)
        return now[1] - before[1]

    def _counted(self) -> tuple[float, float]:
        """Totals so far: finished requests, and tokens per head that events have freed."""
        import httpx

        try:
            text = httpx.get(f"{self._address}/metrics", timeout=60).raise_for_status().text
        except httpx.HTTPError as error:
            raise EngineError(f"{self._address}/metrics: {error}; is it a vLLM server?") from None
        totals = {
            family.name: sum(s.value for s in family.samples if s.name.endswith("_total"))
            for family in text_string_to_metric_families(text)
        }
        freed = totals.get("kvcompress_source_tokens", 0.0)
        freed -= totals.get("kvcompress_kept_tokens", 0.0)
        return totals.get("vllm:request_success", 0.0), freed
