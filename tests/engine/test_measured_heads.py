"""Measured heads in the engine: budgets are shared over the whole model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import prompt

MAX_TOKENS = 40


def test_measured_heads_divide_the_budget_over_the_whole_model(
    llama: str, run_engine: Run, tmp_path: Path
) -> None:
    """A head with all the importance keeps everything; the others share the rest."""
    profile = tmp_path / "heads.json"
    rows = {
        f"{layer}-{head}": [float((layer, head) == (1, 2))]
        for layer in range(3)
        for head in range(4)
    }
    profile.write_text(json.dumps(rows))
    tokens = prompt(640, seed=1)
    report = run_engine(
        llama,
        [[request("a", tokens, MAX_TOKENS)]],
        settings={"policy": "keydiff+headkv", "profile": str(profile), "budget": 0.4},
        record_kept=True,
    )
    counts = [record["counts"] for record in report["kept"]]
    assert counts == [[6, 6], [6, 20], [5, 5]]
    check_decoding(llama, tokens, report["kept"], report["outputs"]["a"])
