"""Conversations that ask late: their requests, and the table of their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import turns as script
from conversations import Turn, needles, requests, words
from tests.cli.server_process import ROOT
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.engine import Question, mean_nats
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer
from vllm_kvcompress.tools.evaluation.setups import FULL, Setup

MODEL = str(ROOT / "models" / "reference")


@pytest.mark.parametrize("build", [needles, words])
def test_later_turns_ask_about_the_first_turn(
    build: Callable[[int, int, int], list[Turn]],
) -> None:
    turns = build(8, 256, 3)
    assert [len(turn.late) for turn in turns] == [0, 2, 0, 2, 0, 0, 0, 2]
    assert turns[1].late == turns[7].late
    for fact in turns[1].late:
        assert len(fact.wanted) > 0
        said = [all(part in turn.text for part in fact.wanted) for turn in turns]
        assert said == [True] + [False] * 7
        assert all(fact != turn.fact for turn in turns)
    assert build(8, 256, 3) == turns
    assert build(8, 256, 4) != turns


def test_requests_begin_with_the_conversation_so_far() -> None:
    """Replies are the right answers; branches are not continued."""
    tokenizer = load_tokenizer(MODEL)
    turns = words(4, 128, seed=1)
    asked = list(requests(tokenizer, turns))
    assert [(each.turn, each.is_late) for each in asked] == [
        (1, False),
        *[(2, True), (2, True), (2, False)],
        (3, False),
        *[(4, True), (4, True), (4, False)],
    ]
    went_on = [each.tokens for each in asked if not each.is_late]
    for each in asked:
        text = tokenizer.decode(each.tokens)
        assert each.fact.question in text[-40:]
        if each.turn > 1:
            former = went_on[each.turn - 2]
            reply = tokenizer(turns[each.turn - 2].fact.answer)["input_ids"]
            assert each.tokens[: len(former)] == former
            assert [token for token in reply if token > 2] == each.tokens[
                len(former) : len(former) + 3
            ]


def test_turns_that_are_too_short_are_refused() -> None:
    with pytest.raises(ConfigError, match="turns of 16 words: too short for 10 facts"):
        words(8, 16, seed=0)


def test_given_tokens_do_not_count_in_the_loss() -> None:
    question = Question([1, 2], [4, 5, 6], 1, agnostic=True, predicted=True, num_given=2)
    said = [{}, {2: -1.0}, {4: -9.0}, {5: -7.0}, {6: -4.0}]
    assert mean_nats(said, question) == 4.0


def rows(how: str, setup: str, needles: list[float], nats: list[float]) -> list[dict[str, Any]]:
    """Returns rows of two questions of a second turn, and of two texts."""
    about = {"how": how, "setup": setup, "group": 0, "turn": 2}
    asked = [about | {"task": "needles", "number": 0, "value": value} for value in needles]
    return asked + [
        about | {"task": "text", "number": number, "value": value}
        for number, value in enumerate(nats)
    ]


def test_table_counts_only_questions_that_the_full_cache_answers() -> None:
    setup = Setup("keydiff", 0.25)
    answers = rows(FULL, FULL, [1, 0.5], [2.0, 3.0])
    answers += rows(script.ANEW, setup.name, [1, 1], [2.1, 3.1])
    answers += rows(script.REUSE, setup.name, [0.5, 1], [2.2, 3.4])
    lines = list(script.table(answers, [Setup(FULL), setup]))
    assert lines[0] == "| setting | needles, turn 2 | text, turn 2 | text, all (95%) |"
    assert lines[2].startswith("| `keydiff@0.25`, anew | 1 of 1 | 0.100 | 0.100 (")
    assert lines[3].startswith("| `keydiff@0.25`, reuse | 0 of 1 | 0.300 | 0.300 (")
