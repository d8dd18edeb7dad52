"""Where questions come from, and how they become prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import tiny_models
from tests.cli.server_process import ROOT
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.items import generate, load
from vllm_kvcompress.tools.evaluation.prompts import split_prompt


def item(context: str, question: str, max_tokens: int = 8, **more: Any) -> Item:
    return Item(
        task="t",
        length=0,
        context=context,
        question=question,
        answers=("a",),
        metric="f1",
        max_tokens=max_tokens,
        **more,
    )


def num_words(text: str) -> int:
    return len(text.split())


def test_built_in_questions_follow_from_the_seed() -> None:
    items = generate("ruler/vt", [200, 300], 2, 5, num_words)
    assert items == generate("ruler/vt", [200, 300], 2, 5, num_words)
    assert items != generate("ruler/vt", [200, 300], 2, 6, num_words)
    assert [item.task for item in items] == ["ruler/vt"] * 4
    assert [item.length for item in items] == [200, 200, 300, 300]


@pytest.mark.parametrize("task", ["rluer", "ruler/none", "vt", "text/vt"])
def test_unknown_tasks_are_refused_with_the_known_ones(task: str) -> None:
    with pytest.raises(ConfigError, match=r"no such task; known are ruler, ruler/niah.* text, "):
        generate(task, [64], 1, 0, num_words)


def test_too_short_contexts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lengths 10: too short for ruler/vt"):
        generate("ruler/vt", [10], 1, 0, num_words)


def test_own_questions(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"context": "c", "question": "q", "answers": "a"}\n\n'
        '{"context": "c", "question": "r", "answers": ["a", "b"], "metric": "f1", '
        '"max_tokens": 5}\n'
    )
    first, second = load(path, "exact_match", 64)
    assert (first.task, first.answers, first.metric, first.max_tokens) == (
        "mine",
        ("a",),
        "exact_match",
        64,
    )
    assert (second.answers, second.metric, second.max_tokens) == (("a", "b"), "f1", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no questions"),
        ("{", "line 1: not valid JSON"),
        ('{"context": "c"}', 'line 1: expected an object with "context", "question"'),
        ('\n{"context": "c", "question": "q", "answers": 3}', "line 2: .answers.: expected a text"),
        ('{"context": "c", "question": "q", "answers": "a", "metric": "x"}', "known are exact_mat"),
        ('{"context": "c", "question": "q", "answers": "a", "max_tokens": 0}', "at least 1"),
    ],
)
def test_wrong_data_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path, "exact_match", 64)


def test_the_parts_of_a_prompt_are_the_chat_that_a_server_would_render() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "reference")
    context, question = "k1 v2 w3 . n1", "find k1"
    head, rest = split_prompt(tokenizer, item(context, question))
    message = [{"role": "user", "content": f"{context}\n{question}"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert head + rest == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(rest).split() == ["find", "k1", "<answer>"]


def test_a_reply_goes_on_from_its_beginning() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "reference")
    _, rest = split_prompt(tokenizer, item("k1 v2 w3 .", "find k1", answer_prefix=" k1 v2"))
    assert tokenizer.decode(rest).split() == ["find", "k1", "<answer>", "k1", "v2"]


def test_without_a_chat_template_the_parts_follow_each_other(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_models.build("llama", tmp_path))
    assert split_prompt(tokenizer, item("w5 w6", "w7")) == ([5, 6], [7])


def test_the_middle_of_a_long_context_is_left_out_where_allowed(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_models.build("llama", tmp_path))
    long = item("w1 w2 w3 w4 w5 w6 w7", "w8 w9", max_tokens=4, may_cut=True)
    assert split_prompt(tokenizer, long, 13) == ([1, 2, 3, 4, 5, 6, 7], [8, 9])
    assert split_prompt(tokenizer, long, 10) == ([1, 2, 6, 7], [8, 9])
    assert split_prompt(tokenizer, long, 6) == ([], [8, 9])
    whole = item("w1 w2 w3 w4 w5 w6 w7", "w8 w9", max_tokens=4)
    assert len(split_prompt(tokenizer, whole, 10)[0]) == 7


def test_a_chat_template_is_left_out_where_the_item_says_so() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "reference")
    bare = item("k1 v2 w3 .", "find k1", separator="", chat=False)
    head, rest = split_prompt(tokenizer, bare)
    assert tokenizer.decode(head + rest).split() == ["k1", "v2", "w3", ".", "find", "k1"]
