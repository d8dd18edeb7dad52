"""Scenarios of chats over HTTP."""

from __future__ import annotations

import json
from typing import Any

from vllm_scenario_parts.scenario import LONG, MODEL, SHORT, Registry, Server, like

SERVED: Registry = []
CHAT = "tests/entrypoints/openai/chat_completion/test_chat.py"
BASIC = "tests/entrypoints/openai/basic/"
LARGEST = 2**63 - 1


def _texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


@like(SERVED, CHAT, "test_no_logprobs_chat", "test_zero_logprobs_chat", "test_some_logprobs_chat")
def chat_logprobs(server: Server) -> Any:
    assert server.chat(logprobs=False).choices[0].logprobs is None
    by_number = []
    for number in (0, 5):
        said = server.chat(logprobs=True, top_logprobs=number).choices[0].logprobs.content
        assert all(len(place.top_logprobs) == number for place in said)
        by_number.append([[place.token, place.logprob] for place in said])
    return by_number


@like(SERVED, CHAT, "test_too_many_chat_logprobs")
def too_many_chat_logprobs(server: Server) -> Any:
    kinds = [
        server.refuses(server.chat, logprobs=True, top_logprobs=21, stream=True),
        server.refuses(server.chat, logprobs=True, top_logprobs=30),
    ]
    return [*kinds, _texts(server.chat())]


@like(SERVED, CHAT, "test_prompt_logprobs_chat", "test_more_than_one_prompt_logprobs_chat")
def chat_prompt_logprobs(server: Server) -> Any:
    by_number = []
    for number in (0, 1, 2):
        said = server.chat(prompt_logprobs=number).prompt_logprobs
        assert len(said) == 200
        assert all(max(1, number) <= len(place) <= number + 1 for place in said[1:])
        by_number.append(sorted(each["logprob"] for each in said[3].values()))
    assert server.chat().prompt_logprobs is None
    return [by_number, server.refuses(server.chat, prompt_logprobs=-5)]


@like(SERVED, CHAT, "test_single_chat_session")
def two_turns(server: Server) -> Any:
    messages = [{"role": "system", "content": SHORT}, {"role": "user", "content": LONG}]
    first = server.chat(messages=messages, max_completion_tokens=5, ignore_eos=True)
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (215, 5)
    said = [{"role": "assistant", "content": "and"}, {"role": "user", "content": SHORT}]
    second = server.chat(messages=messages + said)
    return [_texts(first), _texts(second)]


@like(SERVED, CHAT, "test_chat_streaming")
def streamed_chat(server: Server) -> Any:
    unstreamed = server.chat().choices[0]
    text, reasons, roles = "", [], set()
    for chunk in server.chat(stream=True):
        (choice,) = chunk.choices
        assert not reasons
        text += choice.delta.content or ""
        roles |= {choice.delta.role} - {None}
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert roles == {"assistant"}
    assert (text, reasons) == (unstreamed.message.content, [unstreamed.finish_reason])
    return text


@like(SERVED, CHAT, "test_chat_completion_stream_options")
def usage_of_streamed_chats(server: Server) -> Any:
    def usages(**options: bool) -> list[Any]:
        return [c.usage for c in server.chat(stream=True, stream_options=options, min_tokens=8)]

    assert not any(usages(include_usage=False))
    *parts, last = usages(include_usage=True, continuous_usage_stats=False)
    assert not any(parts)
    assert (last.prompt_tokens, last.completion_tokens, last.total_tokens) == (200, 8, 208)
    counts = [u.completion_tokens for u in usages(include_usage=True, continuous_usage_stats=True)]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    return [server.refuses(server.chat, stream_options={"include_usage": v}) for v in (None, True)]


@like(SERVED, CHAT, "test_extra_fields_allowed", "test_complex_message_content", "test_custom_role")
def forms_of_messages(server: Server) -> Any:
    """Unknown fields, content in parts and unknown roles are accepted."""
    parts = [{"type": "text", "text": LONG}]
    forms = [
        [{"role": "user", "content": LONG}],
        [{"role": "user", "content": LONG, "extra_field": "0"}],
        [{"role": "user", "content": parts}],
        [{"role": "my-custom-role", "content": LONG}],
        [{"role": "my-custom-role", "content": parts}],
    ]
    answers = [_texts(server.chat(messages=messages)) for messages in forms]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@like(SERVED, CHAT, "test_long_seed", "test_chat_completion_n_with_seed")
def seeds(server: Server) -> Any:
    settings = {"temperature": 1.0, "n": 2, "max_tokens": 20}
    by_seed = [_texts(server.chat(SHORT, seed=seed, **settings)) for seed in (42, 42, 43, LARGEST)]
    assert by_seed[0] == by_seed[1] != by_seed[2]
    return [by_seed, [server.refuses(server.chat, seed=s) for s in (LARGEST + 1, -LARGEST - 2)]]


@like(
    *(SERVED, CHAT, "test_chat_completion_n_parameter_non_streaming"),
    *("test_chat_completion_n_parameter_streaming", "test_chat_completion_n_equals_1"),
)
def several_chats(server: Server) -> Any:
    answer = server.chat(LONG, n=3, temperature=1.0, max_tokens=20)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({*_texts(answer)}) > 1
    texts = ["", ""]
    for chunk in server.chat(LONG, n=2, temperature=1.0, max_tokens=15, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(texts)
    return len(server.chat(n=1).choices)


@like(SERVED, CHAT, "test_invocations")
def invocations(server: Server) -> Any:
    """Sagemaker's endpoint answers like the chat endpoint."""
    chat = server.chat()
    body = {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}
    status, text = server.get("/invocations", **body, max_tokens=8, temperature=0)
    assert status == 200
    other = json.loads(text)
    assert {"id", "object", "created", "model", "choices", "usage"} <= other.keys()
    assert other["choices"][0]["message"]["content"] == chat.choices[0].message.content
    return _texts(chat)


@like(SERVED, f"{BASIC}test_chat_echo.py", "echo of the last message")
def echoed_chat(server: Server) -> Any:
    said = [{"role": "user", "content": SHORT}, {"role": "assistant", "content": LONG}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    answer = server.chat(messages=said, echo=True, **going_on)
    assert answer.choices[0].message.content.startswith(LONG)
    return _texts(answer)


@like(SERVED, f"{BASIC}test_return_token_ids.py", "in chats and streams")
def token_ids(server: Server) -> Any:
    answer = server.chat(return_token_ids=True)
    assert len(answer.prompt_token_ids) == 200
    streamed: list[int] = []
    for chunk in server.chat(return_token_ids=True, stream=True):
        streamed += getattr(chunk.choices[0], "token_ids", None) or []
    assert streamed == answer.choices[0].token_ids
    return streamed


@like(
    *(SERVED, "tests/entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py"),
    *("test_chat_logit_bias_valid", "test_chat_logit_bias_invalid"),
)
def logit_bias(server: Server) -> Any:
    answer = server.chat(logit_bias={"40": 100}, return_token_ids=True)
    assert {*answer.choices[0].token_ids} == {40}
    return [server.refuses(server.chat, logit_bias={each: 1}) for each in ("999999", "-1", "x")]


@like(
    *(SERVED, "tests/entrypoints/openai/chat_completion/test_non_object_body_validation.py"),
    *("bodies that are no object",),
)
@like(SERVED, f"{BASIC}test_basic.py", "test_request_wrong_content_type")
def bodies_that_are_none(server: Server) -> Any:
    statuses = []
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, _ = server.get(path, x=1)
        statuses.append(status)
        assert 400 <= status < 500
    kinds = server.refuses(server.chat, messages=[])
    try:
        server.chat(extra_headers={"Content-Type": "application/x-www-form-urlencoded"})
    except Exception as error:
        return [*statuses, kinds, type(error).__name__]
    raise AssertionError("a body that is no JSON was taken")


@like(SERVED, "tests/entrypoints/openai/responses/test_simple.py", "text, stream")
def responses(server: Server) -> Any:
    """OpenAI's Responses API, with and without a stream."""
    settings = {"model": MODEL, "input": LONG, "temperature": 0, "max_output_tokens": 8}
    answer = server.client.responses.create(**settings)
    text = "".join(
        event.delta
        for event in server.client.responses.create(**settings, stream=True)
        if event.type == "response.output_text.delta"
    )
    assert text == answer.output_text
    return text
