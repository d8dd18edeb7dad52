"""A calibration's file, and what is refused as one of something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.cli.server_process import ROOT
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.calibration.measure import left_out
from vllm_kvcompress.tools.calibration.record import (
    Calibration,
    TextLosses,
    conditions_of,
    digest_of_model,
    file_name,
)

MODEL = str(ROOT / "models" / "reference")
POLICY = "snapkv"
CONDITIONS = conditions_of({"policy": POLICY}, MODEL)


def calibration(texts: list[TextLosses] | None = None) -> Calibration:
    """One of 80 texts per half: no loss at 0.5, 0.1 at 0.25."""
    texts = texts or [TextLosses("prose", 512, n % 2 == 0, (0.1, 0.0)) for n in range(160)]
    return Calibration(
        model=MODEL,
        model_digest=digest_of_model(MODEL),
        policy=POLICY,
        conditions=CONDITIONS,
        vllm="0.32",
        lengths=tuple(sorted({text.length for text in texts})),
        continuation=64,
        cap=1.0,
        confidence=0.95,
        budgets=(0.25, 0.5),
        texts=tuple(texts),
    )


def test_the_smallest_budget_is_that_whose_bound_is_low_enough() -> None:
    found = calibration()
    budgets = [found.by_length(limit) for limit in (0.01, 0.05, 0.2)]
    assert budgets == [{512: 1.0}, {512: 0.5}, {512: 0.25}]
    assert found.by_length(0.2, lowest=0.3) == {512: 0.5}
    half, quarter = found.rungs()
    assert (half.budget, half.num_texts, half.num_checked, half.mean) == (0.5, 80, 80, 0.0)
    assert quarter.mean == pytest.approx(0.1)
    assert 0.1 < quarter.bound < 0.2


def test_only_the_half_that_calibrates_decides() -> None:
    texts = [
        TextLosses("prose", 512, n % 2 == 0, (0.0, 0.0 if n % 2 == 0 else 0.9)) for n in range(160)
    ]
    half = calibration(texts).rungs()[0]
    assert half.bound < 0.05
    assert half.checked_mean == pytest.approx(0.9)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    calibration().write(path)
    assert Calibration.read(path) == calibration()
    document = json.loads(path.read_text())
    assert [rung["budget"] for rung in document["rungs"]] == [0.5, 0.25]


def by_length(losses: dict[int, tuple[float, float]]) -> Calibration:
    """One of 80 texts per length and half, with their losses at 0.25 and 0.5."""
    texts = [
        TextLosses("prose", length, n % 2 == 0, each)
        for length, each in losses.items()
        for n in range(160)
    ]
    return calibration(texts)


def test_each_length_has_a_budget_of_its_own() -> None:
    """Each of two bounds holds with 97.5%, so that both hold with 95%."""
    found = by_length({512: (0.1, 0.0), 4096: (0.0, 0.0)})
    assert found.by_length(0.06) == {512: 0.5, 4096: 0.25}
    half, quarter, longer_half, longer_quarter = found.rungs()
    assert [half.length, longer_half.length] == [512, 4096]
    assert longer_quarter.bound == longer_half.bound == half.bound < 0.06 < 0.1 < quarter.bound
    assert found.confidence_of_one == pytest.approx(0.975)
    assert half.bound > calibration().rungs()[0].bound


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"revision": 2}', "[" * 99_999])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"calibration\.json: expected a calibration"):
        Calibration.read(path)


def test_another_revision_and_uneven_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"revision": 0}))
    with pytest.raises(ConfigError, match="of revision 2, found 0"):
        Calibration.read(path)
    path.write_text(json.dumps(document | {"budgets": [0.5]}))
    with pytest.raises(ConfigError, match="2 losses for 1 budgets"):
        Calibration.read(path)


def test_another_model_policy_or_trigger_is_refused_with_both_names(tmp_path: Path) -> None:
    found, path = calibration(), Path("c.json")
    found.check(MODEL, POLICY, CONDITIONS, path)
    found.check("", POLICY, CONDITIONS, path)
    with pytest.raises(ConfigError, match=r"of policy snapkv, expected one of adakv; make it"):
        found.check(MODEL, "adakv", CONDITIONS, path)
    other = conditions_of({"policy": POLICY, "trigger": "chunk:512"}, MODEL)
    with pytest.raises(ConfigError, match="of trigger prompt, expected one of chunk:512"):
        found.check(MODEL, POLICY, other, path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"of model .*reference, expected one of .*/model; make"):
        found.check(str(folder), POLICY, CONDITIONS, path)
    with pytest.raises(ConfigError, match="expected one of org/unknown"):
        found.check("org/unknown", POLICY, CONDITIONS, path)


def test_models_are_told_apart_by_their_files(tmp_path: Path) -> None:
    names = {file_name(MODEL, POLICY, CONDITIONS)}
    for part in ("config.json", "model.safetensors"):
        folder = tmp_path / part
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            content = (Path(MODEL) / name).read_bytes()
            (folder / name).write_bytes(content + (b" " if name == part else b""))
        names.add(file_name(str(folder), POLICY, CONDITIONS))
    assert len(names) == 3
    assert digest_of_model("org/unknown") == ""
    assert file_name("org/a", POLICY, CONDITIONS) != file_name("org/b", POLICY, CONDITIONS)


def test_a_kind_that_is_left_out_may_break_the_promise() -> None:
    """Tables lose at a half what the other kinds do not, so a promise from those does not hold."""
    texts = [
        TextLosses(kind, 512, n % 2 == 0, (0.3, 0.3 if kind == "tables" else 0.0))
        for n in range(80)
        for kind in ("prose", "source", "tables")
    ]
    cases = {case.kind: case for case in left_out(calibration(texts), [0.05])}
    assert (cases["tables"].budget, cases["tables"].holds) == (0.5, False)
    assert cases["tables"].mean == pytest.approx(0.3)
    assert (cases["prose"].budget, cases["prose"].holds) == (1.0, True)
    one_kind = dataclasses.replace(calibration(), texts=calibration().texts[:4])
    assert left_out(one_kind, [0.05]) == []
