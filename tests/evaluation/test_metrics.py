"""Metrics on replies whose scores are known by hand."""

from __future__ import annotations

import pytest

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.metrics import METRICS, check_metric
from vllm_kvcompress.tools.evaluation.summary import agreement


@pytest.mark.parametrize(
    ("metric", "reply", "answers", "expected"),
    [
        ("exact_match", "The  Eiffel Tower.", ["eiffel tower"], 1.0),
        ("exact_match", "the Eiffel Tower in Paris", ["Eiffel Tower"], 0.0),
        ("exact_match", "two", ["one", "two"], 1.0),
        ("contains_all", "k3 v7 w9", ["v7", "w9"], 1.0),
        ("contains_all", "k3 v71 w9", ["v7", "w9"], 0.5),
        ("contains_all", "", ["v7"], 0.0),
        ("contains_all", "It is 3.5, I think", ["3.5"], 1.0),
        ("contains_any", "Say Yes", ["yes", "no"], 1.0),
        ("contains_any", "yesterday", ["yes", "no"], 0.0),
        ("f1", "a red car", ["red house", "car"], 2 / 3),
        ("f1", "", ["red"], 0.0),
        # LCS by sentence of the answer: "the cat sat" 3 + "it slept" 2 of 6 and 6 words.
        ("rouge_l", "it slept. the cat sat there", ["The cat sat. It slept well."], 5 / 6),
        ("rouge_l", "", ["red"], 0.0),
        ("code_similarity", "\n# no\nabcd\nrest", ["abxd"], 0.75),
        ("code_similarity", "# only comments", ["abcd"], 0.0),
        ("classification", "Type: City", ["City", "City", "Other"], 1.0),
        ("classification", "City or Other", ["City", "City", "Other"], 0.5),
        ("classification", "Other city", ["Other city", "Other", "Other city"], 1.0),
        ("classification", "Other", ["City", "City", "Other"], 0.0),
        ("number", "Paragraph 3", ["Paragraph 3"], 1.0),
        ("number", "3 or 30", ["Paragraph 3"], 0.5),
        ("number", "none", ["3"], 0.0),
        ("last_answer", "Answer: 3 or so\n**Answer: -34.**\n", ["-34"], 1.0),
        ("last_answer", "Answer: 34\nAnswer: 35", ["34"], 0.0),
        ("last_answer", "Answer: -34", ["34"], 0.0),
        ("last_answer", "34", ["34"], 0.0),
        ("first_line_f1", "\nred\nblue", ["red"], 1.0),
        ("first_line_classification", "City\nOther", ["City", "City", "Other"], 1.0),
        ("first_line_rouge_l", "red\nblue", ["red"], 1.0),
    ],
)
def test_metric(metric: str, reply: str, answers: list[str], expected: float) -> None:
    assert METRICS[metric](reply, answers) == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["rouge_l", "first_line_rouge_l", "code_similarity"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    check_metric(metric, "--metric")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package .*vllm-kvcompress\[longbench\]"):
        check_metric(metric, "--metric")
    check_metric("f1", "--metric")


@pytest.mark.parametrize(
    ("tokens", "reference", "expected"),
    [([1, 2, 3], [1, 2, 3], 1.0), ([1, 9], [1, 2, 3, 4], 0.25), ([], [], 1.0), ([], [1], 0.0)],
)
def test_agreement_counts_places_of_the_longer_reply(
    tokens: list[int], reference: list[int], expected: float
) -> None:
    assert agreement(tokens, reference) == expected
