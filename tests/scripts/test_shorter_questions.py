"""scripts/measure/shorter_questions.py: the questions of `eval --tasks words`, in fewer words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shorter_questions
from vllm_kvcompress.tools.evaluation.items import generate, load


def test_questions_are_those_of_eval_with_shorter_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rates", "0.5", "--lengths", "200", "--samples", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["shorter_questions.py", *options])
    shorter_questions.main()
    assert "12 questions" in capsys.readouterr().out
    for family in ("single", "multikey", "multivalue", "multiquery", "tracking", "frequent"):
        questions = generate(f"words/{family}", [200], 2, 2_000_000)
        short = load(tmp_path / "0.5" / f"{family}.jsonl", "contains_all", 16)
        for one, other in zip(questions, short, strict=True):
            assert (one.question, one.answers, one.metric) == (
                *(other.question, other.answers, other.metric),
            )
            words, left = one.context.split(), iter(one.context.split())
            kept = other.context.split()
            assert 0.4 * len(words) < len(kept) <= 0.55 * len(words)
            assert all(word in left for word in kept)  # in their order
