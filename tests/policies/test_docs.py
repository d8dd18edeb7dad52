"""The guide's example runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="example")
