"""The guide's example of a policy in another package, installed like its readers do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "writing-a-policy.md"


def blocks(language: str) -> list[str]:
    """Returns the guide's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def install(folder: Path) -> Path:
    """Builds and installs the package without a network; returns what to put on Python's path."""
    project, target = folder / "project", folder / "installed"
    project.mkdir()
    (code,), (about,) = blocks("python"), blocks("toml")
    (project / "fading_values.py").write_text(code)
    (project / "pyproject.toml").write_text(about)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, str(project)]
    subprocess.run(command, check=True, cwd=folder)
    return target
