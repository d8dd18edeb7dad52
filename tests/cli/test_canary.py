"""A real server that scores every answer again: clients see nothing of it, /metrics does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.server_process import OUR_SERVE, ROOT, serving
from tests.cli.test_status_page import declared_plugins
from training.tasks import generate_sample

NUM_WORDS, MAX_TOKENS, TIMEOUT = 500, 24, 40.0
ARGUMENTS = ["serve", str(ROOT / "models" / "reference"), "--served-model-name", "reference"]
ARGUMENTS += ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
ARGUMENTS += ["--kv-policy", "streamingllm", "--kv-budget", "0.25", "--kv-shadow", "1.0"]
ARGUMENTS += ["--kv-allow-request-policies", "none"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("canary")
    packages = declared_plugins(folder / "packages")
    with serving(OUR_SERVE, ARGUMENTS, folder / "server.log", packages=packages) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, seed: int, policy: str | None = None, **more: Any) -> Any:
    sample = generate_sample("multikey", NUM_WORDS, seed)
    return client.completions.create(
        model="reference",
        prompt=f"{sample.context}\n{sample.question}",
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={
            "ignore_eos": True,
            "return_token_ids": True,
            **({"vllm_xargs": {"kv_policy": policy}} if policy else {}),
        },
        **more,
    )


def samples(address: str) -> dict[str, float]:
    """Returns our samples by name, or by outcome."""
    text = urllib3.request("GET", f"{address}/metrics").data.decode()
    families = text_string_to_metric_families(text)
    return {
        sample.labels.get("outcome", sample.name): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("kvcompress_shadow") and not sample.name.endswith("_created")
    }


def wait_for(address: str, outcome: str, number: float) -> dict[str, float]:
    deadline = time.monotonic() + TIMEOUT
    while (found := samples(address))[outcome] < number and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found[outcome] == number
    return found


def test_answers_are_scored_and_clients_get_what_they_asked_for(
    address: str, client: openai.OpenAI
) -> None:
    """Streamed and not, with log-probabilities and without; of an uncompressed one none is."""
    assert samples(address)["scored"] == 0
    plain = ask(client, 1).choices[0]
    assert plain.logprobs is None
    parts = [part.choices[0] for part in ask(client, 1, stream=True) if part.choices]
    assert all(part.logprobs is None for part in parts)
    assert [token for part in parts for token in part.token_ids] == plain.token_ids
    assert "".join(part.text for part in parts) == plain.text
    zero = ask(client, 1, logprobs=0).choices[0]
    assert [len(best) for best in zero.logprobs.top_logprobs] == [1] * MAX_TOKENS
    asked = ask(client, 1, logprobs=3).choices[0]
    assert all(len(best) >= 3 for best in asked.logprobs.top_logprobs)
    assert asked.token_ids == zero.token_ids == plain.token_ids

    found = wait_for(address, "scored", 4)
    assert found["kvcompress_shadow_tokens_total"] == 4 * MAX_TOKENS
    assert found["kvcompress_shadow_loss_count"] == 4
    assert found["kvcompress_shadow_changed_fraction_count"] == 4
    whole = ask(client, 1, policy="none")
    assert whole.choices[0].logprobs is None
    assert wait_for(address, "uncompressed", 1)["scored"] == 4


def test_the_loss_is_that_of_an_uncompressed_request(address: str, client: openai.OpenAI) -> None:
    """The same server's own full cache scores prompt and answer as one prompt."""
    before = samples(address)
    answer = ask(client, 7, logprobs=0).choices[0]
    found = wait_for(address, "scored", before["scored"] + 1)
    text = [*answer.prompt_token_ids, *answer.token_ids]
    full = client.completions.create(
        model="reference",
        prompt=text,
        max_tokens=1,
        extra_body={"prompt_logprobs": 0, "vllm_xargs": {"kv_policy": "none"}},
    )
    scores = full.choices[0].prompt_logprobs[-MAX_TOKENS:]
    lost = sum(answer.logprobs.token_logprobs)
    lost -= sum(next(iter(each.values()))["logprob"] for each in scores)
    names = ("kvcompress_shadow_lost_nats_total", "kvcompress_shadow_gained_nats_total")
    gained = [found[name] - before[name] for name in names]
    assert gained[0] - gained[1] == pytest.approx(lost, abs=1e-3)
    assert abs(lost) > 0.1


def test_the_status_page_shows_it(address: str) -> None:
    document = urllib3.request("GET", f"{address}/kvcompress/status").json()
    assert document["settings"]["shadow"] == 1.0
    assert document["engines"]["0"]["shadow_tokens"] > 0


def test_requests_at_once_are_all_answered_and_scored(address: str, client: openai.OpenAI) -> None:
    before = samples(address)["scored"]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda seed: ask(client, 20 + seed % 6), range(18)))
    for seed, answer in enumerate(answers):
        assert answer.choices[0].token_ids == answers[seed % 6].choices[0].token_ids
    wait_for(address, "scored", before + 18)
