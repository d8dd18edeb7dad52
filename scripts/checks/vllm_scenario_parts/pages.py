"""A server's own pages and metrics, and that ended requests leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import openai

from soak_parts.over_http import read_metrics
from vllm_scenario_parts.chats import BASIC
from vllm_scenario_parts.scenario import LONG, MODEL, Registry, Server, like

SERVED: Registry = []
COUNTS = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success")
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@like(SERVED, f"{BASIC}test_basic.py", "test_show_version", "test_check_health")
@like(SERVED, "tests/entrypoints/openai/models/test_models.py", "test_check_models")
def version_and_models(server: Server) -> Any:
    assert server.get("/health")[0] == 200
    assert server.get("/ping")[0] == 200
    (model,) = server.client.models.list().data
    return [json.loads(server.get("/version")[1]), model.id, model.max_model_len]


@like(
    SERVED, "tests/entrypoints/serve/tokenize/test_tokenization.py", "both ways, of texts and chats"
)
def tokenization(server: Server) -> Any:
    status, text = server.get("/tokenize", model=MODEL, prompt=LONG)
    tokens = json.loads(text)["tokens"]
    assert (status, len(tokens)) == (200, 200)
    status, text = server.get("/detokenize", model=MODEL, tokens=tokens)
    assert json.loads(text)["prompt"] == LONG
    chat = [{"role": "user", "content": LONG}]
    status, text = server.get("/tokenize", model=MODEL, messages=chat)
    return [tokens, json.loads(text)["count"]]


@like(SERVED, "tests/entrypoints/serve/instrumentator/test_metrics.py", "test_metrics_counts")
@like(SERVED, "tests/v1/metrics/test_metrics.py", "prompt tokens, generation tokens")
def counts(server: Server) -> Any:
    """vLLM's own metrics count what was asked and said."""
    before = read_metrics(server.address)
    for number in range(4):
        server.complete([10 + number] * 100, max_tokens=6, ignore_eos=True)
    after = read_metrics(server.address)
    counts = [after[name] - before[name] for name in COUNTS]
    assert counts == [400, 24, 4]
    return counts


def _wait_until_idle(server: Server) -> None:
    """Waits until no request runs or waits, and no block is held."""
    counts: dict[str, float] = {}
    for _ in range(240):
        server.complete([10], max_tokens=1)
        metrics = read_metrics(server.address)
        counts = {name: metrics[name] for name in BUSY}
        if not any(counts.values()):
            return
        time.sleep(0.25)
    raise AssertionError(f"left over: {counts}")


@like(SERVED, f"{BASIC}test_basic.py", "test_request_cancellation")
@like(SERVED, "tests/v1/engine/test_async_llm.py", "test_abort", "test_mid_stream_cancellation")
def clients_that_leave(server: Server) -> Any:
    """Forty clients leave before their answers, ten during a stream; others are answered."""
    expected = server.complete(max_tokens=16).choices[0].text
    impatient = server.client.with_options(timeout=0.3)

    def leave() -> None:
        with contextlib.suppress(openai.APITimeoutError):
            impatient.completions.create(
                model=MODEL, prompt=LONG, max_tokens=700, extra_body={"ignore_eos": True}
            )
            raise AssertionError("700 tokens in 0.3 seconds")

    leaving = [threading.Thread(target=leave) for _ in range(40)]
    for thread in leaving:
        thread.start()
    for _ in range(10):
        stream = server.complete(max_tokens=700, ignore_eos=True, stream=True)
        for _ in zip(range(3), stream, strict=False):
            pass
        stream.close()
    for thread in leaving:
        thread.join()
    _wait_until_idle(server)
    assert server.complete(max_tokens=16).choices[0].text == expected
    return expected


@like(SERVED, "tests/v1/engine/test_async_llm.py", "test_load")
def many_at_once(server: Server) -> Any:
    """Thirty requests together say what each says alone, and leave nothing."""
    prompts = [[10 + (i * j) % 90 for j in range(60 + 3 * i)] for i in range(30)]
    alone = [server.complete(prompt).choices[0].text for prompt in prompts]
    together: dict[int, str] = {}

    def ask(number: int) -> None:
        together[number] = server.complete(prompts[number]).choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(30)] == alone
    _wait_until_idle(server)
    return alone
