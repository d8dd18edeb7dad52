"""A miniature clone: scripts/setup.sh with locks that name tiny packages of local indexes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.scripts import local_index

ROOT = Path(__file__).parents[2]
TORCH = "2.13.0+cpu"
# Builds the editable wheel of the miniature's own package.
BACKEND = """
from pathlib import Path
from local_index import write_wheel

def build_editable(directory, config_settings=None, metadata_directory=None):
    info = "vllm_kvcompress-0.1.0.dist-info"
    command = "[console_scripts]\\nvllm-kvcompress = alpha:main\\n"
    files = {"own.py": "", f"{info}/entry_points.txt": command}
    return write_wheel(Path(directory), "vllm_kvcompress", "0.1.0", files=files).name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "vllm-kvcompress"
version = "0.1.0"
"""


@dataclass
class Clone:
    """A folder with the set-up script, and the indexes that it may ask.

    Attributes:
        root: the clone.
        index: the default index.
        environment: variables to add to, or (None) take from, those of the script.
    """

    root: Path
    index: Path
    environment: dict[str, str | None] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def modules(self) -> Path:
        return next(self.venv.glob("lib/python*/site-packages"))

    def variables(self, **more: str | None) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PIP_") and not name.lower().endswith("_proxy")
        }
        wanted = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.as_uri(),
            "PIP_RETRIES": "0",
            "PYTHON": sys.executable,
            "PYTHONPATH": None,
            "TORCH_INDEX_URL": None,
            **self.environment,
            **more,
        }
        for name in wanted:
            kept.pop(name, None)
        return {**kept, **{name: value for name, value in wanted.items() if value is not None}}

    def set_up(self, **variables: str | None) -> subprocess.CompletedProcess[str]:
        """Runs the script, and asserts that it prints nothing to stdout."""
        done = subprocess.run(
            [self.root / "scripts/setup.sh"],
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.stdout == ""
        return done

    def installed(self, name: str) -> str:
        """Returns the version of an installed package."""
        done = subprocess.run(
            [self.venv / "bin/python", "-c", f"import {name}; print({name}.VERSION)"],
            env=self.variables(),
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() or done.stderr


def make_clone(folder: Path, torch_in: str = "index") -> Clone:
    """Makes a miniature clone; torch may be in another index than the default."""
    root = folder / "clone"
    (root / "scripts").mkdir(parents=True)
    (root / "requirements").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", root / "scripts")
    shutil.copy(local_index.__file__, root)
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "requirements/cpu.lock").write_text(f"alpha==1.0\ntorch=={TORCH}\n")
    (root / "requirements/dev.lock").write_text("beta==1.0\n")
    index = folder / "index"
    for name in ("alpha", "beta"):
        local_index.add_package(index, name, "1.0", ["nowhere-to-be-found"])
    local_index.add_package(index, "torch", "2.13.0", ["nvidia-cudnn"])
    local_index.add_package(folder / torch_in, "torch", TORCH)
    return Clone(root, index)
