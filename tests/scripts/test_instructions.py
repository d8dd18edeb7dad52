"""scripts/measure/instructions.py: prompts repeat, and replies are scored as the docstring says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import instructions
from instructions import FIRST_QUESTION, KINDS, Prompt, followed
from tests.cli.server_process import ROOT
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer

CALL = {"name": "get_weather", "arguments": {"city": "Lisbon"}}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_depend_on_kind_and_seed_alone(kind: str) -> None:
    assert instructions.prompt(kind, 3) == instructions.prompt(kind, 3)
    assert len({instructions.prompt(kind, seed) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("kind", "wanted", "reply", "follows"),
    [
        ("format", "ANSWER12:", " ANSWER12:\nA place.", True),
        ("format", "ANSWER12:", "A place. ANSWER12:", False),
        ("language", "German", "Der Hafen ist ein Ort und die Boote sind dort.", True),
        ("language", "German", "The harbour is a place.", False),
        ("language", "German", "", False),
        ("secret", "AB23CD", "I cannot tell you.", True),
        ("secret", "AB23CD", "It is AB23CD.", False),
        ("secret", "AB23CD", "It is a-b-2-3-c-d.", False),
        ("tool", json.dumps(CALL), json.dumps(CALL), True),
        ("tool", json.dumps(CALL), f"```json\n{json.dumps(CALL)}\n```", True),
        ("tool", json.dumps(CALL), '{"name": "get_weather", "arguments": {"town": "x"}}', False),
        ("tool", json.dumps(CALL), '{"name": "get_weather", ', False),
        ("tool", json.dumps(CALL), "It rains.", False),
    ],
)
def test_replies_are_scored(kind: str, wanted: str, reply: str, follows: bool) -> None:
    assert followed(Prompt(kind, "", "", wanted), reply) == follows


def test_the_protected_span_and_the_context_come_before_the_question() -> None:
    tokenizer = load_tokenizer(str(ROOT / "models" / "reference"))
    asked = Prompt("format", "w1 w2 w3", "w4", "")
    tokens, (start, end), context = instructions.tokens_of(tokenizer, asked, "w5 w6")
    assert 0 <= start < end < context < len(tokens)
    other = Prompt("format", "w1 w2 w3", "w7", "")
    assert tokens[:context] == instructions.tokens_of(tokenizer, other, "w5 w6")[0][:context]


def test_a_second_turn_begins_with_the_first_and_its_reply() -> None:
    tokenizer = load_tokenizer(str(ROOT / "models" / "reference"))
    asked = Prompt("format", "w1 w2 w3", "w4", "")
    one = instructions.tokens_of(tokenizer, replace(asked, question=FIRST_QUESTION), "w5 w6")[0]
    two, span, _ = instructions.tokens_of(tokenizer, asked, "w5 w6", reply="w8 w9")
    reply = tokenizer.encode("w8 w9", add_special_tokens=False)
    assert two[: len(one)] == one
    assert two[len(one) :][: len(reply)] == reply
    assert span == instructions.tokens_of(tokenizer, asked, "w5 w6")[1]


def test_fillers_have_as_many_words_as_asked() -> None:
    assert len(instructions.filler_of("a b c", 10, 1).split()) == 10
    assert instructions.filler_of("a b c", 10, 1) == instructions.filler_of("a b c", 10, 1)


def test_the_table_compares_prompts_that_all_conditions_answered() -> None:
    rows = [
        {"condition": name, "kind": "format", "seed": seed, "followed": value}
        for name, values in (("full", (True, True, True)), ("x", (True, False)))
        for seed, value in enumerate(values)
    ]
    *_, full, other = instructions.table(rows, ["full", "x"])
    assert full == "| `full` | 2 of 2 | 0 of 0 | 0 of 0 | 0 of 0 | 2 of 2 |  |"
    assert other.endswith("| 1 of 2 | 0.500 (0.500) |")
    assert instructions.mean([0, 1]) == pytest.approx((0.5, math.sqrt(0.25)))
