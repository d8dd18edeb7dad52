"""RULER's tasks: every answer follows from the context, and prompts are as long as asked for."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.items import generate as generate_items
from vllm_kvcompress.tools.evaluation.metrics import METRICS
from vllm_kvcompress.tools.evaluation.ruler import NOISE, TASKS, generate, haystack

LENGTH = 1500


def count_tokens(text: str) -> int:
    """Words and punctuation marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def prompt_of(task: str, seed: int = 0, length: int = LENGTH) -> Item:
    return generate(task, length, seed, count_tokens)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_their_length(task: str) -> None:
    prompt = prompt_of(task)
    text = f"{prompt.context}\n{prompt.question}{prompt.answer_prefix}"
    assert 0.93 * LENGTH <= count_tokens(text) + prompt.max_tokens <= LENGTH
    assert prompt == prompt_of(task)
    assert prompt.context != prompt_of(task, seed=1).context


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_context_and_not_in_the_question(task: str) -> None:
    for seed in range(5):
        prompt = prompt_of(task, seed)
        metric = METRICS[prompt.metric]
        assert metric(prompt.context, prompt.answers) == 1
        assert metric(prompt.question + prompt.answer_prefix, prompt.answers) == 0
        assert len(set(prompt.answers)) == len(prompt.answers)


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles_of_the_asked_keys_hold_the_answers(task: str) -> None:
    for seed in range(5):
        prompt = prompt_of(task, seed)
        pattern = r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\."
        needles = re.findall(pattern, prompt.context)
        found = [value for _, key, value in needles if key in re.split(r"[ ,]+", prompt.question)]
        assert sorted(found) == sorted(prompt.answers)
        count = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
        assert len(needles) >= count if "needles" in task or task[-5:-2] == "key" else True
        if prompt.depth is not None and task.startswith("niah_single"):
            place = prompt.context.index("One of the special") / len(prompt.context)
            assert place == pytest.approx(prompt.depth, abs=0.1)
    assert len(prompt.answers) == (4 if task in ("niah_multivalue", "niah_multiquery") else 1)


def test_the_wording_is_rulers() -> None:
    one, many = prompt_of("niah_single_1"), prompt_of("niah_multiquery")
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        f"will quiz you about the number afterwards.\n{NOISE[:10]}"
    )
    assert re.fullmatch(
        r"What is the special magic number for \w+-\w+ mentioned in the provided text\?",
        one.question,
    )
    assert many.context.startswith("Some special magic numbers are hidden within")
    assert many.question.count(",") == 3
    assert many.answer_prefix.endswith("mentioned in the provided text are")


def test_a_chain_of_variables_is_in_order() -> None:
    for seed in range(5):
        prompt = prompt_of("vt", seed)
        lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt.context)
        assert [name for name, _ in lines] == list(prompt.answers)
        assert [source for _, source in lines[1:]] == list(prompt.answers[:-1])
        assert lines[0][1] in prompt.question


def test_common_and_frequent_words_are_the_most_frequent() -> None:
    common = prompt_of("cwe", length=3000)
    words = Counter(re.findall(r"\d+\. (\S+)", common.context))
    assert {word for word, _ in words.most_common(10)} == set(common.answers)
    assert set(words.values()) == {30, 3}
    frequent = prompt_of("fwe")
    coded = Counter(word for word in frequent.context.split() if re.fullmatch("[a-z]{6}", word))
    top = coded.most_common(4)
    assert tuple(word for word, _ in top[:3]) == frequent.answers
    assert len({count for _, count in top}) == 4


def test_two_hops_need_two_documents() -> None:
    prompt = prompt_of("qa_2")
    pupil = re.search(r"teacher of (\w+) grow", prompt.question)
    assert pupil is not None
    teacher = re.search(rf"{pupil.group(1)} was taught by (\w+)\.", prompt.context)
    assert teacher is not None
    assert f"{teacher.group(1)} grew up in {prompt.answers[0]}." in prompt.context


def test_lengths_that_are_too_short_are_noticed() -> None:
    with pytest.raises(ConfigError, match="--lengths 100: too short for ruler/cwe"):
        generate("cwe", 100, 0, count_tokens)


def test_items_carry_prompt_metric_and_prefix() -> None:
    items = generate_items("ruler", [LENGTH], 1, 0, count_tokens)
    assert [item.task for item in items] == [f"ruler/{task}" for task in TASKS]
    assert {item.metric for item in items} == {"contains_all", "contains_any"}
    assert all(item.answer_prefix for item in items)


def test_the_haystack_has_no_numbers() -> None:
    assert len(haystack()) > 40
    assert not re.search(r"\d", " ".join(haystack()))
