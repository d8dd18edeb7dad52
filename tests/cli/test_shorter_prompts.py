"""A real server that shortens chats with a classifier that is trained here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import urllib3

from tests.cli.server_process import OUR_SERVE, ROOT, serving
from tests.cli.test_status_page import declared_plugins
from tests.prompts.trained import FAMILIES, train
from training.evaluate import HELD_OUT_SEED
from training.tasks import NOISE, Sample, generate_sample
from vllm_kvcompress.tools.evaluation.metrics import contains_all

KEY = "a key of this test"
NUM_WORDS = 600  # of a context, more than a chunk; at most 256 of them are facts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def address(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("shorter")
    arguments = ["serve", str(ROOT / "models" / "reference"), "--served-model-name", "reference"]
    arguments += ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    arguments += ["--api-key", KEY, "--kv-policy", "snapkv", "--kv-budget", "0.75"]
    arguments += ["--prompt-compressor", f"llmlingua2:{classifier}", "--prompt-rate", "0.5"]
    arguments += ["--prompt-min-request-rate", "0.3", "--prompt-max-request-rate", "1.0"]
    packages = declared_plugins(folder / "packages")
    with serving(OUR_SERVE, arguments, folder / "server.log", packages=packages) as address:
        yield address


def samples() -> list[Sample]:
    return [generate_sample(family, NUM_WORDS, HELD_OUT_SEED + 5) for family in FAMILIES]


def ask(address: str, sample: Sample, **more: Any) -> Any:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="reference",
            messages=[{"role": "user", "content": f"{sample.context}\n\n{sample.question}"}],
            temperature=0,
            max_tokens=16,
            **more,
        )
        return list(answer) if more.get("stream") else answer


def counted(address: str) -> dict[str, float]:
    """Returns this package's metrics by name, those of prompts with their labels."""
    headers = {"Authorization": f"Bearer {KEY}"}
    text = urllib3.request("GET", f"{address}/metrics", headers=headers).data.decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kvcompress_")]
    return {
        name.partition("{")[0] + ("|no" if 'remembered="no"' in name else ""): float(value)
        for name, value in lines
    }


def test_answers_survive_half_of_the_prompt_and_a_compressed_cache(address: str) -> None:
    before, scores = counted(address), []
    asked = samples()
    for sample in asked:
        answer = ask(address, sample)
        scores.append(contains_all(answer.choices[0].message.content, sample.answers))
        assert 0.47 * NUM_WORDS < answer.usage.prompt_tokens < 0.53 * NUM_WORDS
    assert sum(scores) / len(scores) >= 0.9, scores
    after = counted(address)
    gained = {name: after[name] - before[name] for name in after if "_bucket" not in name}
    assert gained["kvcompress_prompt_source_tokens_total"] == NUM_WORDS * len(asked)
    kept = gained["kvcompress_prompt_kept_tokens_total"]
    assert 0.47 * NUM_WORDS < kept / len(asked) <= 0.5 * NUM_WORDS
    assert gained["kvcompress_prompt_seconds_count"] == len(asked)
    assert gained["kvcompress_prompt_texts_total|no"] == len(asked)
    assert gained["kvcompress_events_total"] == len(asked)
    headers = {"Authorization": f"Bearer {KEY}"}
    page = urllib3.request("GET", f"{address}/kvcompress/status", headers=headers).json()
    assert page["prompts"]["kept_tokens"] == after["kvcompress_prompt_kept_tokens_total"]
    assert page["prompts"]["requests"] == after["kvcompress_prompt_seconds_count"]


def test_only_noise_is_removed_from_prompts(classifier: Path) -> None:
    from vllm_kvcompress.prompts.llmlingua2 import TokenClassifier

    scorer = TokenClassifier(str(classifier))
    for sample in samples():
        short, _ = scorer.score(sample.context).shortened(sample.context, 0.5)
        facts = [
            [word for word in text.split() if word not in NOISE] for text in (sample.context, short)
        ]
        assert facts[0] == facts[1], sample.family


def test_requests_choose_their_rate_and_streams_work(address: str) -> None:
    sample = samples()[0]
    unshortened = ask(address, sample, extra_body={"vllm_xargs": {"prompt_rate": 1.0}})
    assert unshortened.usage.prompt_tokens == NUM_WORDS + len(sample.question.split()) + 2
    third = ask(address, sample, extra_body={"vllm_xargs": {"prompt_rate": 0.3}})
    assert third.usage.prompt_tokens < 0.33 * NUM_WORDS
    parts = ask(address, sample, stream=True)
    reply = "".join(part.choices[0].delta.content or "" for part in parts)
    assert contains_all(reply, sample.answers) == 1
    for rate in (0.1, "half"):
        with pytest.raises(openai.BadRequestError, match="prompt_rate"):
            ask(address, sample, extra_body={"vllm_xargs": {"prompt_rate": rate}})
    with pytest.raises(openai.BadRequestError, match="kv_context_tokens"):
        ask(address, sample, extra_body={"vllm_xargs": {"kv_context_tokens": 9}})
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    with client, pytest.raises(openai.BadRequestError, match="only the messages of chats"):
        client.completions.create(
            model="reference", prompt="find k3", extra_body={"vllm_xargs": {"prompt_rate": 0.5}}
        )


def test_requests_without_the_api_key_are_not_shortened(address: str) -> None:
    before = counted(address)
    body = {"model": "reference", "messages": [{"role": "tool", "content": samples()[1].context}]}
    for headers in ({}, {"Authorization": "Bearer another"}):
        url = f"{address}/v1/chat/completions"
        assert urllib3.request("POST", url, json=body, headers=headers).status == 401
    after = counted(address)
    assert {
        n: after[n] - before[n] for n in after if "_prompt_" in n and after[n] != before[n]
    } == {}


def test_malformed_chats_get_vllms_own_error(address: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    url = f"{address}/v1/chat/completions"
    for body in (b"{", b"[]", b'{"messages": 5}'):
        answer = urllib3.request("POST", url, body=body, headers=headers)
        assert answer.status == 400
        assert answer.json()["error"]["type"]
