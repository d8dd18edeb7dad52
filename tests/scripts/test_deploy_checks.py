"""scripts/checks/deploy/*.sh name all missing programs at once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("check", "packages"),
    [
        ("manifests", "npm"),
        ("observability", "prometheus npm"),
        ("image", "buildah podman runc mmdebstrap"),
    ],
)
def test_missing_packages_are_named(tmp_path: Path, check: str, packages: str) -> None:
    for name in ("bash", "dirname", "mkdir"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "checks" / "deploy" / f"{check}.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    expected = f"check_deploy: missing; on Debian: apt-get install --yes {packages}\n"
    assert done.stderr == expected
