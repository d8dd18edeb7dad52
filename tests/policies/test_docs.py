"""There is one pipeline; the guide's example is run by `test_packages.py`."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_kvcompress.policies.policy import Stages

ROOT = Path(__file__).parents[2]


def test_one_pipeline_is_documented() -> None:
    sources = [*(ROOT / "vllm_kvcompress").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    documented = {
        path.relative_to(ROOT).as_posix(): pipeline.group()
        for path in [*sources, ROOT / "README.md"]
        for pipeline in re.finditer(r"\bscore( -> \w+)+", path.read_text())
    }
    assert {"docs/writing-a-policy.md", "vllm_kvcompress/policies/__init__.py"} <= set(documented)
    assert set(documented.values()) == {" -> ".join(Stages._fields)}
