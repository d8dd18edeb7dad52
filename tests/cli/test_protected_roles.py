"""A real server that never evicts system messages and tools, and sheds reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.cli.server_process import OUR_SERVE, ROOT, serving
from tests.cli.test_status_page import declared_plugins
from training.tasks import NOISE, generate_sample
from vllm_kvcompress.tools.evaluation.metrics import contains_all

TEMPLATE = (
    "{{ '<bos> ' }}{% for tool in tools or [] %}{{ tool.function.description }}{{ ' . ' }}"
    "{% endfor %}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'user' %}{{ ' <answer> ' }}{% else %}{{ ' . ' }}{% endif %}"
    "{% endfor %}"
)
NUM_FACTS, NUM_NOISE, SEED = 96, 600, 400
GATHER = 6  # the word's token

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("roles")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    arguments = ["serve", str(ROOT / "models" / "reference"), "--served-model-name", "reference"]
    arguments += ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    arguments += ["--chat-template", str(template), "--kv-policy", "streamingllm"]
    arguments += ["--kv-budget", "0.25", "--kv-protect", "system,tools"]
    arguments += ["--kv-after-reasoning", "0.1", "--reasoning-config"]
    arguments += ['{"reasoning_start_str": "trace", "reasoning_end_str": "gather"}']
    packages = declared_plugins(folder / "packages")
    with serving(OUR_SERVE, arguments, folder / "server.log", packages=packages) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def noise(number: int) -> str:
    return " ".join(NOISE[i * i % len(NOISE)] for i in range(number))


def tools(description: str) -> dict[str, Any]:
    function = {"name": "f", "description": description, "parameters": {}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}


def ask(client: openai.OpenAI, first: dict[str, Any] | None, question: str, **more: Any) -> str:
    messages = [{"role": "user", "content": f"{noise(NUM_NOISE)} {question}"}]
    answer = client.chat.completions.create(
        model="reference",
        messages=[first, *messages] if first else messages,
        temperature=0,
        max_tokens=12,
        **more,
    )
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("family", ["multikey", "multiquery"])
def test_facts_of_protected_parts_are_found_behind_a_long_text(
    client: openai.OpenAI, family: str
) -> None:
    """StreamingLLM forgets all but the last tokens, and a user's message with them."""
    sample = generate_sample(family, NUM_FACTS, SEED)
    system = {"role": "system", "content": sample.context}
    assert contains_all(ask(client, system, sample.question), sample.answers) == 1
    found = ask(client, None, sample.question, **tools(sample.context))
    assert contains_all(found, sample.answers) == 1
    forgotten = ask(client, {**system, "role": "assistant"}, sample.question)
    assert contains_all(forgotten, sample.answers) < 1


def test_a_request_names_further_tokens(client: openai.OpenAI) -> None:
    """Roles and its own: the first message is the assistant's, of 96 tokens behind the first."""
    sample = generate_sample("multikey", NUM_FACTS, SEED)
    messages = [
        {"role": "assistant", "content": sample.context},
        {"role": "system", "content": noise(10)},
        {"role": "user", "content": f"{noise(NUM_NOISE)} {sample.question}"},
    ]
    more = {"temperature": 0, "max_tokens": 12, "model": "reference", "messages": messages}
    for spans, is_found in (([1, 97], True), ([1, 3], False)):
        answer = client.chat.completions.create(
            **more, extra_body={"vllm_xargs": {"kv_protect": spans}}
        )
        found = contains_all(str(answer.choices[0].message.content), sample.answers) == 1
        assert found == is_found


def test_what_cannot_be_protected_is_a_400_with_the_reason(client: openai.OpenAI) -> None:
    """And harms no other request."""
    system = {"role": "system", "content": noise(40)}
    with pytest.raises(openai.BadRequestError, match=r"300 of the prompt's .* a head keeps"):
        ask(client, {**system, "content": noise(300)}, "find k3")
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        ask(client, system, "find k3", extra_body={"truncate_prompt_tokens": 100})
    with pytest.raises(openai.BadRequestError, match="found an end of 5000"):
        ask(client, system, "find k3", extra_body={"vllm_xargs": {"kv_protect": [0, 5000]}})
    with pytest.raises(openai.BadRequestError, match="starts and ends"):
        ask(client, system, "find k3", extra_body={"vllm_xargs": {"kv_protect": [5, 0]}})
    with pytest.raises(openai.BadRequestError, match="roles are found in /v1/chat/completions"):
        client.responses.create(model="reference", input="find k3", max_output_tokens=4)
    assert ask(client, system, "find k3")


def test_the_end_of_reasoning_that_the_server_names_is_an_event(
    client: openai.OpenAI, address: str
) -> None:
    """The model is made to write nothing else, in front of too few tokens and of enough."""
    for max_tokens, events in ((4, 0), (120, 1)):
        client.completions.create(
            model="reference",
            prompt=noise(NUM_NOISE),
            max_tokens=max_tokens,
            temperature=0,
            logit_bias={str(GATHER): 100},
        )
        text = httpx.get(f"{address}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if 'trigger="reasoning"' in line]
        counts = [float(line.split()[-1]) for line in lines if "events_total" in line]
        assert counts == [events]
