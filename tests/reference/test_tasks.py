"""The reference model's tasks can be answered from the context by plain reading."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.tasks import FAMILIES, Sample, generate_sample
from vllm_kvcompress.tools.evaluation.metrics import contains_all

samples = st.builds(
    generate_sample, st.sampled_from(FAMILIES), st.integers(64, 700), st.integers(0, 10_000)
)


def answer_by_reading(sample: Sample) -> list[str]:
    """Answers a question by reading the text."""
    words = sample.context.split()
    verb, *keys = sample.question.split()
    if verb == "find":
        return [w for key in keys for w in words[words.index(key) : words.index(key) + 3]]
    if verb == "gather":
        pairs = [(key, words[i + 1]) for key in keys for i, w in enumerate(words) if w == key]
        return [word for pair in sorted(pairs, key=lambda p: p[1][0]) for word in pair]
    if verb == "trace":
        chain = [keys[0]]
        while chain[-1].startswith("x"):
            places = [i for i, w in enumerate(words) if w == chain[-1] and words[i + 1] != "."]
            chain.append(words[places[0] + 1])
        return chain
    assert verb == "count"
    kinds = [[w for w in words if w.startswith(kind)] for kind in "fgh"]
    return [Counter(kind).most_common(1)[0][0] for kind in kinds]


@given(sample=samples)
def test_answers_follow_from_the_context(sample: Sample) -> None:
    assert " ".join(answer_by_reading(sample)) == sample.answer
    assert set(sample.answers) <= set(sample.answer.split())
    assert set(sample.answers) <= set(sample.context.split())


@given(family=st.sampled_from(FAMILIES), length=st.integers(64, 1200), seed=st.integers(0, 10_000))
def test_contexts_have_the_requested_length(family: str, length: int, seed: int) -> None:
    sample = generate_sample(family, length, seed)
    assert len(sample.context.split()) == length
    assert sample == generate_sample(family, length, seed)
    assert sample != generate_sample(family, length, seed + 1)


@given(sample=samples)
def test_score_is_the_share_of_right_answers(sample: Sample) -> None:
    assert contains_all(sample.answer, sample.answers) == 1.0
    assert contains_all(sample.question, sample.answers) == 0.0
    assert contains_all("", sample.answers) == 0.0
    partial = contains_all(sample.answers[0], sample.answers)
    assert partial == pytest.approx(1 / len(sample.answers))


def test_too_short_contexts_and_unknown_families_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 64, got 10"):
        generate_sample("single", 10, 0)
    with pytest.raises(ValueError, match="families are single, multikey"):
        generate_sample("nothing", 100, 0)
