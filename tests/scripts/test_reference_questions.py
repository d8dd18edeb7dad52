"""scripts/measure/reference_questions.py: questions for `eval --data`, whole and in fewer words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import reference_questions
from training.tasks import FAMILIES, generate_sample
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.items import load


def written(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> None:
    options = ["--lengths", "200,64", "--samples", "2", "--out", str(folder), *more]
    monkeypatch.setattr(sys, "argv", ["reference_questions.py", *options])
    reference_questions.main()


def read(folder: Path, family: str) -> list[Item]:
    return load(folder / f"{family}@200.jsonl", "exact_match", 64)


def test_questions_are_samples_of_the_model_s_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(monkeypatch, tmp_path)
    names = {path.stem for path in tmp_path.iterdir()}
    assert names == {f"{family}@{length}" for family in FAMILIES for length in (200, 64)}
    for number, item in enumerate(read(tmp_path, "tracking")):
        sample = generate_sample("tracking", 200, 2_000_000 + number)
        assert (item.context, item.question) == (sample.context, sample.question)
        assert (item.answers, item.metric, item.max_tokens) == (sample.answers, "contains_all", 16)


def test_shorter_contexts_have_the_same_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(monkeypatch, tmp_path)
    written(monkeypatch, tmp_path, "--rates", "0.5")
    assert "24 questions" in capsys.readouterr().out
    for family in FAMILIES:
        short = read(tmp_path / "0.5", family)
        for one, other in zip(read(tmp_path, family), short, strict=True):
            assert (one.question, one.answers) == (other.question, other.answers)
            words, left = one.context.split(), iter(one.context.split())
            kept = other.context.split()
            assert 0.4 * len(words) < len(kept) <= 0.55 * len(words)
            assert all(word in left for word in kept)  # in their order
