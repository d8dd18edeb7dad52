"""Documentation names one pipeline; `test_packages.py` runs the guide's example."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_kvcompress.policies.policy import Stages

ROOT = Path(__file__).parents[2]


def test_every_mention_of_the_pipeline_names_the_same_stages() -> None:
    sources = [*(ROOT / "vllm_kvcompress").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    documented = {
        path.relative_to(ROOT).as_posix(): pipeline.group()
        for path in [*sources, ROOT / "README.md"]
        for pipeline in re.finditer(r"\bscore( -> \w+)+", path.read_text())
    }
    assert {"docs/writing-a-policy.md", "vllm_kvcompress/policies/__init__.py"} <= set(documented)
    assert set(documented.values()) == {" -> ".join(Stages._fields)}
