#!/usr/bin/env python3
"""Writes requirements/cpu.lock and dev.lock: every package that scripts/setup.sh installs.

    scripts/lock.py           # the newest versions that fit requirements/*.in and pyproject.toml
    scripts/lock.py --keep    # what is locked stays, for a package or a Python that is added

Resolves once for each supported Python, with pip in an environment of that Python, since what is
needed and what there is may differ among them: such lines get a marker, all others are the same for
all. Needs those interpreters on PATH, or --python 3.12=/path/to/python3.12, and the default package
index; it downloads little, as pip reads metadata alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
# vLLM's CPU build asks for these. Their CUDA builds, which default indexes have, break its import,
# and it works without them.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
# What the CUDA build of torch depends on and the CPU build does not. Its Triton stays: tests
# compile kernels with the version that GPUs get.
OF_CUDA = re.compile(r"(nvidia|cuda)\b")
HEADERS = {
    "cpu": f"""\
# What serving on CPU needs, for Python {", ".join(PYTHONS)} on Linux x86-64. Written by
# scripts/lock.py from cpu.in and pyproject.toml. Without torchvision, torchaudio and torchcodec:
# their CUDA builds break the import of vLLM. Install with --no-deps (scripts/setup.sh does).
""",
    "dev": """\
# Test, lint and plot tools on top of cpu.lock. Written by scripts/lock.py from dev.in.
# Install with --no-deps.
""",
}
Pins = dict[str, str]  # version by the name that its package gives itself


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes both locks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="let stay what is locked already")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="VERSION=PATH",
        help="the interpreter of a version (default: pythonVERSION on PATH)",
    )
    chosen = parser.parse_args(arguments)
    interpreters = dict(choice.split("=", 1) for choice in chosen.python)
    locks: dict[str, dict[str, Pins]] = {name: {} for name in HEADERS}
    with tempfile.TemporaryDirectory() as temporary:
        for python in PYTHONS:
            print(f"lock: resolving for Python {python}", file=sys.stderr)
            folder = Path(temporary) / python
            folder.mkdir()
            interpreter = interpreters.get(python, f"python{python}")
            pip = make_environment(interpreter, folder)
            for name, pins in resolve_all(pip, ROOT, chosen.keep, folder).items():
                locks[name][python] = pins
    for name, header in HEADERS.items():
        text = header + "".join(f"{line}\n" for line in lock_lines(locks[name]))
        (ROOT / "requirements" / f"{name}.lock").write_text(text)


def make_environment(interpreter: str, folder: Path) -> list[str]:
    """The command that installs into a new environment of this interpreter, with the newest pip."""
    subprocess.run([interpreter, "-m", "venv", folder / "venv"], check=True)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
    # Versions of pip before 23.3 download whole packages to read their metadata.
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    return pip


def resolve_all(pip: Sequence[str], root: Path, keep: bool, folder: Path) -> dict[str, Pins]:
    """What each lock holds for the Python whose pip this is.

    Args:
        pip: the command that would install.
        root: the repository.
        keep: constrain to the versions that are locked.
        folder: for files on the way.
    """
    requirements = root / "requirements"
    constraints = [f"-c{requirements / name}.lock" for name in HEADERS] if keep else []
    own = folder / "own.txt"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    own.write_text("".join(f"{line}\n" for line in project["dependencies"]))
    cpu = [f"-r{requirements / 'cpu.in'}", f"-r{own}"]
    _write_stand_ins(pip, requirements / "cpu.in", folder)

    found = _resolve(pip, [*cpu, *constraints], folder)
    pinned = folder / "cpu.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in found.items()))
    everything = _resolve(
        pip, [*cpu, f"-r{requirements / 'dev.in'}", f"-c{pinned}", *constraints], folder
    )
    return {
        "cpu": {name: pin for name, pin in found.items() if normalized(name) not in LEFT_OUT},
        "dev": {name: pin for name, pin in everything.items() if name not in found},
    }


def lock_lines(resolved: Mapping[str, Pins]) -> list[str]:
    """The lines of a lock, from what was resolved for each version of Python."""
    pythons_of: dict[str, list[str]] = {}
    for python, pins in resolved.items():
        for name, version in pins.items():
            pythons_of.setdefault(f"{name}=={version}", []).append(python)
    lines = []
    for pin, pythons in pythons_of.items():
        marker = " or ".join(f'python_version == "{python}"' for python in pythons)
        lines.append(pin if len(pythons) == len(resolved) else f"{pin} ; {marker}")
    return sorted(lines, key=lambda line: line.lower().split("=="))


def normalized(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _resolve(pip: Sequence[str], arguments: Sequence[str], folder: Path) -> Pins:
    found = _report(pip, [*arguments, "--prefer-binary", "--find-links", str(folder)], folder)
    return {package["name"]: package["version"] for package in found}


def _report(pip: Sequence[str], arguments: Sequence[str], folder: Path) -> Iterable[dict[str, Any]]:
    """The metadata of everything that pip would install."""
    report = folder / "report.json"
    options = ["--dry-run", "--ignore-installed", "--report", str(report)]
    subprocess.run([*pip, *options, *arguments], check=True)
    return [package["metadata"] for package in json.loads(report.read_text())["install"]]


def _write_stand_ins(pip: Sequence[str], cpu_in: Path, folder: Path) -> None:
    """Writes what resolves in place of packages that the default index lacks or has for CUDA only.

    The CPU build of torch depends on what the CUDA build of that version depends on, without CUDA.
    """
    (vllm,) = _report(pip, ["--no-deps", f"-r{cpu_in}"], folder)
    version = re.search(r"\btorch==([\w.]+)\+cpu", "\n".join(vllm["requires_dist"]))
    if version is None:
        raise SystemExit(f"lock: {vllm['name']} {vllm['version']} asks for no CPU build of torch")
    (torch,) = _report(pip, ["--no-deps", f"torch=={version[1]}"], folder)
    needed = [line for line in torch["requires_dist"] if OF_CUDA.match(line) is None]
    _write_stand_in(folder, "torch", f"{version[1]}+cpu", needed)
    for name in LEFT_OUT:
        _write_stand_in(folder, name, "9999", [])


def _write_stand_in(folder: Path, name: str, version: str, requires: Iterable[str]) -> None:
    """Writes a wheel that has metadata and nothing else."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


if __name__ == "__main__":
    main()
