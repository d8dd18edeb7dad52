"""The guide's example runs as it stands, and there is one pipeline."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from vllm_kvcompress.policies.policy import Stages

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "writing-a-policy.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="example")


def test_one_pipeline_is_documented() -> None:
    sources = [*(ROOT / "vllm_kvcompress").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    documented = {
        path.relative_to(ROOT).as_posix(): pipeline.group()
        for path in [*sources, ROOT / "README.md"]
        for pipeline in re.finditer(r"\bscore( -> \w+)+", path.read_text())
    }
    assert {"docs/writing-a-policy.md", "vllm_kvcompress/policies/__init__.py"} <= set(documented)
    assert set(documented.values()) == {" -> ".join(Stages._fields)}
