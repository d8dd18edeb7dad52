"""Which texts of a chat are shortened, by how much, and what is cached."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.settings import PromptSettings
from vllm_kvcompress.prompts.shortener import PromptShortener, Work
from vllm_kvcompress.prompts.words import ScoredText, ScoredWords

COMPRESSOR = "llmlingua2:somewhere"
LONG = "Keep a drop b Keep c drop d"
DOUBLE = f"{LONG}\n\n{LONG}"


class Scorer:
    """Words that begin with a capital letter matter; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> ScoredText:
        self.asked.append(text)
        spans, start = [], 0
        for word in text.split():
            start = text.index(word, start)
            spans.append((start, start + len(word)))
            start += len(word)
        actual = np.array(spans, dtype=np.int32)
        # Ties would all stay or all go.
        matters = [text[s].isupper() - i / 1000 for i, (s, _) in enumerate(spans)]
        words = ScoredWords(
            actual[:, 0], actual[:, 1], np.array(matters), np.ones(len(spans), dtype=np.int32)
        )
        return ScoredText(len(spans), (words,))


def settings(**given: Any) -> PromptSettings:
    return PromptSettings.from_dict({"compressor": COMPRESSOR, "min_tokens": 2, **given})


def rewritten(body: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Rewrites a body, and checks that the original is not changed."""
    before = copy.deepcopy(body)
    raw, _ = PromptShortener(settings(**given), Scorer()).rewrite(json.dumps(body).encode())
    assert body == before
    result: dict[str, Any] = json.loads(raw)
    return result


SHORT = "Keep a drop Keep"  # of LONG at a half


def test_only_user_assistant_and_tool_texts_are_shortened() -> None:
    """Kept: system prompts, questions, tools, images, calls, reasoning, messages to continue."""
    image = {"type": "image_url", "image_url": {"url": f"data:,{LONG}"}}
    call = {"id": LONG, "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": LONG},
            {"role": "developer", "content": LONG},
            {"role": "user", "content": LONG, "name": LONG},
            {"role": "assistant", "content": LONG, "reasoning_content": LONG, "tool_calls": [call]},
            {"role": "tool", "content": LONG, "tool_call_id": LONG},
            {"role": "user", "content": [{"type": "text", "text": DOUBLE}, image]},
            {
                "role": "user",
                "content": [
                    image,
                    {"type": "text", "text": LONG},
                    image,
                    {"type": "text", "text": LONG},
                ],
            },
            {"role": "tool", "content": [{"type": "text", "text": f"  {LONG}\n"}]},
            {"role": "assistant", "content": LONG},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
        "documents": [{"text": LONG}],
    }
    expected = copy.deepcopy(body)
    messages: Any = expected["messages"]
    for index in (2, 3, 4):
        messages[index]["content"] = SHORT
    messages[5]["content"][0]["text"] = "Keep a drop b Keep c Keep Keep"  # one text
    messages[6]["content"][1]["text"] = SHORT
    messages[7]["content"][0]["text"] = f"  {SHORT}\n"
    assert rewritten(body) == expected


def test_the_last_paragraph_of_the_last_user_turn_is_the_question() -> None:
    for blank in ("\n\n", "\n \t\n", "\r\n\r\n\r\n"):
        content = f"{LONG}{blank}{LONG}{blank}{LONG}\nmore?\n"
        body = {"messages": [{"role": "user", "content": content}]}
        new = rewritten(body)["messages"][0]["content"]
        assert new.endswith(f"{blank}{LONG}\nmore?\n")
        assert len(new) < len(content) - 15
        asked = rewritten(body, roles={"question": 0.5})["messages"][0]["content"]
        assert asked.startswith(new[: new.rindex(blank)])
        assert len(asked) < len(new)
    alone = {"messages": [{"role": "user", "content": LONG}]}
    assert rewritten(alone) == alone


@pytest.mark.parametrize("role", ["system", "tools", "assistant", "user", "tool"])
def test_roles_have_rates_of_their_own(role: str) -> None:
    function = {"name": "f", "description": LONG}
    speakers = ("system", "user", "assistant", "tool")
    body = {
        "messages": [
            *({"role": speaker, "content": LONG} for speaker in speakers),
            {"role": "user", "content": "Why?"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    got = rewritten(body, rate=1.0, roles={role: 0.5})
    changed = [m["role"] for m in got["messages"] if m["content"] == SHORT]
    if got["tools"] != body["tools"]:
        changed.append("tools")
    assert changed == [role]


def test_a_rate_of_one_is_the_identity_to_the_byte() -> None:
    raw = b'{ "messages" : [{"role":"user","content":"' + LONG.encode() + b'"},{"role":"tool"}]}'
    scorer = Scorer()
    shorter, work = PromptShortener(settings(rate=1.0), scorer).rewrite(raw)
    assert shorter is raw
    assert scorer.asked == []
    assert work == Work()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe{}"),
        *(b"{}", b'{"messages": 3}', b'{"messages": [3, {"role": []}], "tools": 3}'),
        *(b'{"messages": [{"role": "user", "content": 5}], "tools": [1, {"function": 2}]}',),
        *(b'{"messages": [{"role": "tool", "content": "Keep \\ud800 drop drop drop"}]}',),
        *(b'{"messages": [{"role": "tool", "content": [{"type": "text", "text": 1}, "x"]}]}',),
    ],
)
def test_bodies_that_are_no_chat_are_left_to_vllm(raw: bytes) -> None:
    assert PromptShortener(settings(), Scorer()).rewrite(raw)[0] is raw


def chat(content: str, **xargs: object) -> bytes:
    body: dict[str, Any] = {"messages": [{"role": "tool", "content": content}]}
    if xargs:
        body["vllm_xargs"] = xargs
    return json.dumps(body).encode()


def content_of(raw: bytes) -> Any:
    return json.loads(raw)["messages"][0]["content"]


def test_requests_choose_within_the_operators_limits() -> None:
    limited = settings(min_request_rate=0.3, max_request_rate=1.0, roles={"assistant": 0.5})
    shortener = PromptShortener(limited, Scorer())
    raw, work = shortener.rewrite(chat(LONG, prompt_rate=1.0, kv_budget=0.5))
    assert content_of(raw) == LONG
    assert json.loads(raw)["vllm_xargs"] == {"kv_budget": 0.5}
    assert work.source_tokens == 0
    assert content_of(shortener.rewrite(chat(LONG, prompt_rate=0.3))[0]) == "Keep a Keep"
    assert content_of(shortener.rewrite(chat(LONG))[0]) == SHORT
    for rate, reason in {
        0.29: "allows 0.3 to 1",
        0: "vllm_xargs prompt_rate should be greater",
        1.1: "less than or equal to 1, found 1.1; give for example 0.5",
        "half": "should be a valid number, found 'half'",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            shortener.rewrite(chat(LONG, prompt_rate=rate))
    with pytest.raises(ConfigError, match="lets no request choose"):
        PromptShortener(settings(), Scorer()).rewrite(chat(LONG, prompt_rate=0.5))
    with pytest.raises(ConfigError, match="number of tokens of a context is not known"):
        shortener.rewrite(chat(LONG, kv_context_tokens=4))


def test_a_target_is_shared_by_all_texts() -> None:
    """Texts without a rate of their own share it: 16 tokens come down to at most 8."""
    body = {"messages": [{"role": role, "content": LONG} for role in ("tool", "system", "tool")]}
    body["messages"].append({"role": "assistant", "content": f"{LONG} Keep"})
    body["messages"].append({"role": "user", "content": "Why?"})
    shortener = PromptShortener(settings(target_tokens=8, roles={"assistant": 0.9}), Scorer())
    raw, work = shortener.rewrite(json.dumps(body).encode())
    contents = [message["content"] for message in json.loads(raw)["messages"]]
    assert contents[:3] == [SHORT, LONG, SHORT]
    assert 0.6 < len(contents[3].split()) / 9 < 1
    assert (work.num_scored, work.num_remembered) == (2, 0)
    plenty = PromptShortener(settings(target_tokens=800), Scorer())
    assert plenty.rewrite(chat(LONG))[0] == chat(LONG)


def test_texts_are_remembered_whatever_the_rate_and_forgotten_in_time() -> None:
    scorer = Scorer()
    limits = {"min_request_rate": 0.1, "max_request_rate": 1.0}
    shortener = PromptShortener(settings(**limits), scorer, max_characters=3 * (256 + 27))
    names = [f"{LONG}{i}"[1:] for i in range(4)]
    assert {len(name) for name in names} == {27}
    for name in names[:3]:
        _, work = shortener.rewrite(chat(name))
        assert (work.num_scored, work.num_remembered) == (1, 0)
    _, work = shortener.rewrite(chat(f" {names[0]}\n", prompt_rate=0.3))
    assert (work.num_scored, work.num_remembered) == (0, 1)
    shortener.rewrite(chat(names[3]))  # the one that nobody has asked for longest goes
    assert scorer.asked == names
    for name, again in zip((names[0], names[3], names[2]), (0, 0, 0), strict=True):
        assert shortener.rewrite(chat(name))[1].num_scored == again
    assert shortener.rewrite(chat(names[1]))[1].num_scored == 1
    salted = json.dumps({**json.loads(chat(names[1])), "cache_salt": "mine"}).encode()
    assert [shortener.rewrite(salted)[1].num_scored for _ in range(2)] == [1, 0]


def test_many_threads_give_the_same_as_one() -> None:
    shortener = PromptShortener(settings(), Scorer(), max_characters=2000)
    bodies = [chat(f"{LONG} {i % 13}") for i in range(200)]
    alone = [PromptShortener(settings(), Scorer()).rewrite(body)[0] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert [raw for raw, _ in pool.map(shortener.rewrite, bodies)] == alone


def test_work_counts_tokens_before_and_after_shortening() -> None:
    raw, work = PromptShortener(settings(), Scorer()).rewrite(chat(LONG))
    assert (work.source_tokens, work.kept_tokens) == (8, len(content_of(raw).split()))
    _, short = PromptShortener(settings(min_tokens=100), Scorer()).rewrite(chat(LONG))
    assert short == Work()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"compressor": "selective:m"}, "expected llmlingua2:MODEL"),
        ({"compressor": "llmlingua2:"}, "expected llmlingua2:MODEL"),
        ({"compressor": None}, "is missing; give for example llmlingua2:"),
        ({"rate": 0}, "greater than or equal to 0.01, found 0"),
        ({"rate": 1.5}, "less than or equal to 1, found 1.5"),
        ({"rate": 0.5, "target_tokens": 100}, "leave one of them out"),
        ({"target_tokens": 0}, "greater than or equal to 1"),
        ({"roles": {"robot": 0.5}}, "should be 'user', "),
        ({"roles": {"tool": 2}}, "found 2; give for example tool=0.3"),
        ({"force_tokens": [""]}, "at least 1 character"),
        ({"force_tokens": ["."] * 101}, "at most 100 items"),
        ({"min_request_rate": 0.5}, "expected both"),
        ({"min_request_rate": 0.5, "max_request_rate": 0.4}, "in this order"),
        ({"device": ""}, "cuda:1"),
        ({"speed": 1}, "speed is not known; valid are compressor"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PromptSettings.from_dict({"compressor": COMPRESSOR, **given})


def test_settings_survive_their_dictionary() -> None:
    given = {
        "compressor": COMPRESSOR,
        "rate": 0.4,
        "roles": {"tool": 0.2},
        "force-tokens": ["\n"],
        "min_tokens": 0,
        "min_request_rate": 0.2,
        "max_request_rate": 1,
        "device": "cuda:1",
    }
    read = PromptSettings.from_dict(given)
    assert PromptSettings.from_dict(json.loads(json.dumps(read.to_dict()))) == read
    for target in (settings(), settings(target_tokens=3)):
        assert PromptSettings.from_dict(target.to_dict()) == target
    assert read.model == "somewhere"
