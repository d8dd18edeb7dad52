"""The matrix of models: a part of it runs, and says what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_matrix import judged, page, result_of

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
STOCK = {"answer": [[1, 2], [-0.1, -0.2]]}
OURS = {
    "answer": STOCK["answer"],
    "unchanged": True,
    "events": [[9, 3]],
    "compressed": [[1, 5], [-0.1, -0.4]],
    "layers": {"CompressedAttentionSpec": 4},
}


def columns(line: str) -> list[str]:
    return [column.strip() for column in line.strip("|").split("|")]


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "GraniteSWAForCausalLM", "Step1ForCausalLM", "SarvamMLAForCausalLM"],
)
def test_classes_are_served_or_refused_as_the_page_says(tmp_path: Path, name: str) -> None:
    row = result_of(name, tmp_path)
    result, reason, classes = columns(page([row]).splitlines()[-1])
    (listed,) = (line for line in PAGE.splitlines() if f"`{name}`" in line)
    assert columns(listed)[:2] == [result, reason]
    assert classes == f"`{name}`"


def test_what_fails_is_told_from_what_is_served() -> None:
    """Another token at budget 1.0, no freed block, and another first token fail."""
    assert judged(STOCK, OURS)["result"] == "served"
    beside = {**OURS["layers"], "DependentMambaSpec": 2}
    assert judged(STOCK, {**OURS, "layers": beside})["result"] == "in part"
    for change in (
        {"answer": [[1, 3], [-0.1, -0.2]]},
        {"answer": [[1, 2], [-0.1, -0.3]]},
        {"unchanged": False},
        {"events": [[3, 3]]},
        {"compressed": [[2, 5], [-0.1, -0.4]]},
        {"error": "cannot", "kind": "ValueError"},
    ):
        assert judged(STOCK, {**OURS, **change})["result"] == "failed", change
    refusal = {"error": "ALiBi", "kind": "UnsupportedError"}
    assert judged(STOCK, refusal) == {"result": "refused", "reason": "ALiBi"}
