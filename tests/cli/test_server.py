"""A compressed server as its users see it: the official client, /metrics, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import urllib3

from tests import foreign_policy, tiny_models
from tests.cli.server_process import OUR_SERVE, serving
from tests.cli.test_server_metrics import scraped
from tests.forked import command

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}w9"
PROMPT_TOKENS = 1000
FULL_BLOCKS = PROMPT_TOKENS // 32
KEPT_BLOCKS = -(-FULL_BLOCKS // 4)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    model = tiny_models.build("llama", folder)
    config = folder / "serve.yaml"
    config.write_text(
        f"model: {model}\nserved-model-name: tiny\nmax-model-len: 2048\ndtype: float32\n"
        "enforce-eager: true\nkvcompress: {policy: adakv+criticalkv, budget: 0.5}\n"
    )
    arguments = ["serve", f"--config={config}", "--kv-budget", "0.25", "--kv-min-tokens", "64"]
    arguments += ["--chat-template", CHAT_TEMPLATE]
    arguments += ["--kv-allow-request-policies", "keydiff,fading,none"]
    arguments += ["--kv-min-request-budget", "0.1", "--kv-max-request-budget", "0.75"]
    arguments += ["--kv-reuse-contexts"]
    packages = foreign_policy.install(folder)
    with serving(
        OUR_SERVE, arguments, folder / "server.log", packages=packages, fresh=True
    ) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def completed(client: openai.OpenAI, seed: int) -> str:
    answer = client.completions.create(
        model="tiny",
        prompt=tiny_models.prompt(PROMPT_TOKENS, seed),
        max_tokens=8,
        temperature=0,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    return answer.choices[0].text


def test_streamed_chat_equals_unstreamed_chat(client: openai.OpenAI) -> None:
    content = " ".join(f"w{token}" for token in tiny_models.prompt(500, seed=1))
    messages = [{"role": "user", "content": content}]
    settings = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    unstreamed = client.chat.completions.create(**settings).choices[0].message.content
    chunks = client.chat.completions.create(**settings, stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert unstreamed
    assert streamed == unstreamed


def test_prompt_is_one_event_with_the_budget_of_the_command_line(
    address: str, client: openai.OpenAI
) -> None:
    before = scraped(address)
    completed(client, seed=2)
    after = scraped(address)
    gained = {name: after[name] - before[name] for name in after}
    assert gained["kvcompress_events_total"] == 1
    assert gained["kvcompress_source_tokens_total"] == 32 * FULL_BLOCKS
    assert gained["kvcompress_kept_tokens_total"] == 32 * KEPT_BLOCKS
    assert gained["kvcompress_blocks_freed_total"] == FULL_BLOCKS
    assert gained["kvcompress_blocks_written_total"] == KEPT_BLOCKS
    assert gained["kvcompress_kept_fraction_count"] == 1
    assert gained["kvcompress_event_seconds_sum"] > 0


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(20, "shorter_than_min_tokens"), (64, None), (31 + 64, None)]
)
def test_short_prompts_are_skipped_and_counted(
    address: str, client: openai.OpenAI, num_tokens: int, reason: str | None
) -> None:
    before = scraped(address)
    client.completions.create(
        model="tiny", prompt=tiny_models.prompt(num_tokens, seed=3), max_tokens=2
    )
    after = scraped(address)
    events = after["kvcompress_events_total"] - before["kvcompress_events_total"]
    assert events == (0 if reason else 1)
    if reason:
        name = f"kvcompress_skipped_total{{{reason}}}"
        assert after[name] - before[name] == 1


def test_refused_request_leaves_others_unchanged(client: openai.OpenAI) -> None:
    expected = completed(client, seed=4)
    answers: list[str] = []
    other = threading.Thread(target=lambda: answers.append(completed(client, seed=4)))
    other.start()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(
            model="tiny", prompt=tiny_models.prompt(2100, seed=5), max_tokens=8
        )
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[5, 6], max_tokens=8, temperature=-1)
    other.join()
    assert answers == [expected]
    assert completed(client, seed=4) == expected


def test_request_can_name_its_context(address: str, client: openai.OpenAI) -> None:
    """The event compresses the context alone; invalid values are a 400."""
    before = scraped(address)
    settings = {"model": "tiny", "prompt": tiny_models.prompt(PROMPT_TOKENS, seed=6)}
    client.completions.create(
        **settings, max_tokens=4, extra_body={"vllm_xargs": {"kv_context_tokens": 640}}
    )
    after = scraped(address)
    name = "kvcompress_source_tokens_total"
    assert after[name] - before[name] == 640
    with pytest.raises(openai.BadRequestError, match=r"kv_context_tokens .* equal to 1, found -3"):
        client.completions.create(
            **settings, max_tokens=4, extra_body={"vllm_xargs": {"kv_context_tokens": -3}}
        )


def test_request_can_prepare_its_context_for_others(address: str, client: openai.OpenAI) -> None:
    """Prepares a context with the request of docs/serving.md; `max_tokens` above 1 is a 400."""
    context = tiny_models.prompt(320, seed=9)
    xargs = {"kv_context_tokens": 320}
    preparing = {
        "model": "tiny",
        "prompt": [*context, 5, 6, *context],
        "extra_body": {"vllm_xargs": {**xargs, "kv_prepare": True}},
    }
    before = scraped(address)
    client.completions.create(**preparing, max_tokens=1)
    client.completions.create(
        model="tiny", prompt=[*context, 7, 8], max_tokens=4, extra_body={"vllm_xargs": xargs}
    )
    after = scraped(address)
    gained = {name: after[name] - before[name] for name in after}
    assert gained["kvcompress_events_total"] == 1
    assert gained["kvcompress_source_tokens_total"] == 320
    assert gained["kvcompress_contexts_reused_total"] == 1
    with pytest.raises(openai.BadRequestError, match="kv_prepare: expected max_tokens 1, found 4"):
        client.completions.create(**preparing, max_tokens=4)


def test_request_can_choose_policy_and_budget_within_limits(
    address: str, client: openai.OpenAI
) -> None:
    """Other policies, other budgets and none; choices that are not allowed are a 400."""
    settings = {"model": "tiny", "prompt": tiny_models.prompt(640, seed=7), "max_tokens": 4}

    def ask(**xargs: object) -> dict[str, float]:
        before = scraped(address)
        client.completions.create(**settings, extra_body={"vllm_xargs": xargs})
        after = scraped(address)
        return {name: after[name] - before.get(name, 0) for name in after}

    half = ask(kv_policy="keydiff", kv_budget=0.5)
    assert half["kvcompress_events_total{keydiff}"] == 1
    assert half["kvcompress_blocks_written_total"] == 10
    somebody_else_s = ask(kv_policy="fading", kv_budget=0.25)  # of another package
    assert somebody_else_s["kvcompress_events_total{fading}"] == 1
    assert somebody_else_s["kvcompress_blocks_written_total"] == 5
    assert ask(kv_budget=0.1)["kvcompress_blocks_written_total"] == 2
    assert ask(kv_policy="none")["kvcompress_events_total"] == 0
    for wrong, message in (
        (
            {"kv_policy": "snapkv"},
            "this server allows adakv.criticalkv and keydiff and fading and none",
        ),
        ({"kv_budget": 0.9}, "this server allows 0.1 to 0.75"),
        ({"kv_budgett": 0.5}, "kv_budgett is not known"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(**wrong)


def posted(address: str, body: dict[str, object]) -> tuple[int, str]:
    """Posts a completion in Python's JSON, with NaN and Infinity; returns status and text."""
    answer = urllib3.request(
        "POST",
        f"{address}/v1/completions",
        body=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        timeout=300,
        retries=False,
    )
    return answer.status, answer.data.decode()


ODD_VALUES = (
    *(True, 0, -1, 2.5, 2**63, 10**30, float("nan"), float("inf"), -float("inf"), 1e-320),
    *("", "\x00", "keydiff ", "KEYDIFF", "snapkv", "../keydiff", "\u202e", "x" * 1_000_000),
    *([], ["keydiff"], {}, {"keydiff": 1}, [[[[[[[]]]]]]]),
)


def test_odd_values_are_refused_with_a_reason(address: str, client: openai.OpenAI) -> None:
    expected = completed(client, seed=8)
    for key in ("kv_policy", "kv_budget", "kv_read", "kv_context_tokens", "kv_other"):
        for value in ODD_VALUES:
            if key == "kv_context_tokens" and (value is True or value == 2**63):
                continue  # vLLM makes 1 of it; more than there are, which is the whole prompt
            body = {
                "model": "tiny",
                "prompt": [5] * 40,
                "max_tokens": 1,
                "vllm_xargs": {key: value},
            }
            status, text = posted(address, body)
            assert status == 400, (key, str(value)[:50], status)
            message = json.loads(text)["error"]["message"]
            assert 0 < len(message) < 2_100_000
    assert completed(client, seed=8) == expected


def test_names_chosen_by_clients_add_no_metric_series(address: str) -> None:
    """1,000 unknown models and policies add no series, not even to vLLM's own metrics."""

    def series() -> set[str]:
        lines = urllib3.request("GET", f"{address}/metrics").data.decode().splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 1}
    assert posted(address, {**body, "model": "none"})[0] == 404
    assert posted(address, {**body, "vllm_xargs": {"kv_policy": "no"}})[0] == 400
    before = series()
    for number in range(500):
        assert posted(address, {**body, "model": f"model-{number}"})[0] == 404
        assert posted(address, {**body, "vllm_xargs": {"kv_policy": f"no-{number}"}})[0] == 400
    assert series() == before


def test_unsupported_engine_option_is_refused_in_one_line(tmp_path: Path) -> None:
    model = tiny_models.build("llama", tmp_path)
    arguments = ["serve", str(model), "--kv-policy", "snapkv", "--kv-budget", "0.25"]
    arguments += ["--disable-hybrid-kv-cache-manager"]
    done = command(tmp_path, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    refusal = done.stderr.splitlines()[-1]
    assert refusal.startswith("vllm-kvcompress: error: --disable-hybrid-kv-cache-manager")
