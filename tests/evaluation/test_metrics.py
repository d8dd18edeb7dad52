"""Metrics on replies whose scores are known by hand."""

from __future__ import annotations

import pytest

from vllm_kvcompress.evaluation.metrics import METRICS
from vllm_kvcompress.evaluation.summary import agreement


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
    ],
)
def test_metric(metric: str, reply: str, answers: list[str], expected: float) -> None:
    assert METRICS[metric](reply, answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "reference", "expected"),
    [([1, 2, 3], [1, 2, 3], 1.0), ([1, 9], [1, 2, 3, 4], 0.25), ([], [], 1.0), ([], [1], 0.0)],
)
def test_agreement_counts_places_of_the_longer_reply(
    tokens: list[int], reference: list[int], expected: float
) -> None:
    assert agreement(tokens, reference) == expected
