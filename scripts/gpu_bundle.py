#!/usr/bin/env python3
"""Packs vLLM and this project for a machine with a GPU and without network, and unpacks it there.

    python3 -m pip list --format=freeze > has.txt                              # on the machine
    scripts/gpu_bundle.py --arch sm_90 --has has.txt --model MODEL --out DIR   # with network
    python3 scripts/gpu_bundle.py --unpack DIR                                 # on the machine

Packing takes vLLM's CUDA build and keeps the device code of one architecture, adds the wheels that
the machine's list lacks, this project's wheel and the configuration of a model, whose weights vLLM
makes up with load_format=dummy. It writes parts of at most 60 MB. It needs the packages `packaging`
and `tqdm`, a package index and an interpreter of the machine's Python version.

Unpacking needs pip, and no index. Ends with 1 if something cannot be imported afterwards.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bundle_parts import archive

if TYPE_CHECKING:
    from bundle_parts.wheels import Machine

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # all but weights
IMPORTS = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm_kvcompress.vllm_plugin",
    "vllm_kvcompress.cli.main",
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arch", type=architecture, metavar="sm_90", help="pack for this GPU")
    what.add_argument("--unpack", type=Path, metavar="DIR", help="install from this folder")
    packing = parser.add_argument_group("packing")
    packing.add_argument("--out", type=Path, metavar="DIR", help="where the parts go")
    packing.add_argument("--has", type=Path, metavar="FILE", help="pip list of the machine")
    packing.add_argument("--model", type=Path, metavar="DIR", help="with config.json (none)")
    packing.add_argument(
        "--vllm", default="0.32.0", metavar="VERSION|WHEEL", help="of the CUDA build (%(default)s)"
    )
    packing.add_argument("--wheel", type=Path, help="this project's (default: built from here)")
    packing.add_argument(
        "--python", default=sys.executable, help="of the machine's version (%(default)s)"
    )
    packing.add_argument(
        "--with",
        dest="wanted",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of what is left out: deep_gemm, fa2, fmha_sm100, mla, moe, rust, or a package",
    )
    packing.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="PACKAGE",
        help="of what the machine lacks, to leave it out all the same",
    )
    packing.add_argument(
        "--originals", action="store_true", help="leave device code of all architectures"
    )
    packing.add_argument(
        "--part-megabytes", type=float, default=60.0, help="of a part at most (%(default)s)"
    )
    unpacking = parser.add_argument_group("unpacking")
    unpacking.add_argument(
        "--target", type=Path, metavar="DIR", help="for PYTHONPATH (default: this Python's own)"
    )
    options = parser.parse_args(arguments)
    if options.arch and not (options.out and options.has):
        parser.error("--arch needs --out and --has")
    return options


def architecture(text: str) -> int:
    """Reads sm_90 as 90; the code of sm_90a is kept with it."""
    match = re.fullmatch(r"sm_(\d{2,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected sm_ and a number, such as sm_90, got {text}")
    return int(match[1])


def pack(options: argparse.Namespace) -> None:
    """Writes a bundle, and prints what it left out and how large its parts are."""
    from bundle_parts import wheels

    packages = check(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        carried = folder / "contents" / "wheels"
        carried.mkdir(parents=True)
        machine = wheels.Machine(folder / "machine", options.python, packages)
        vllm = vllm_wheel(options.vllm, machine, folder / "vllm")
        left_out = wheels.left_out_files(options.arch, options.wanted)
        slim = wheels.slim_wheel(vllm, carried, options.arch, left_out, options.originals)
        own = options.wheel or build_wheel(folder / "own")
        shutil.copy(own, carried)
        kept = packages.keys() & set(wheels.KEPT_PACKAGES)
        without = kept | (set(wheels.OPTIONAL_PACKAGES) - set(options.wanted))
        missing = machine.missing([wheels.stand_in(vllm, folder, without), own])
        machine.download(wheels.pins_without(missing, options.without), carried)
        if options.model:
            copy_model(options.model, carried.parent / "model")
        description = {
            "architecture": f"sm_{options.arch}",
            "python": machine.version,
            "extensions": wheels.extension_modules(slim.path),
            "wheels": sorted(path.name for path in carried.iterdir()),
        }
        max_bytes = int(options.part_megabytes * 1e6)
        parts = archive.pack(carried.parent, options.out, max_bytes, description)
    for line in [*slim.lines(), *(f"{part}: {part.stat().st_size:,} bytes" for part in parts)]:
        print(line)


def check(options: argparse.Namespace) -> dict[str, str]:
    """Returns the machine's packages, versions by name; refuses what cannot be packed."""
    from bundle_parts import wheels

    packages = wheels.read_packages(options.has.read_text())
    if "torch" not in packages:
        raise SystemExit(
            f"gpu_bundle: expected torch in {options.has}, found {len(packages)} other packages; "
            "bundles carry no torch, so install its CUDA build on the machine first."
        )
    optional = {*wheels.OPTIONAL_FILES, *wheels.OPTIONAL_PACKAGES}
    if unknown := sorted(set(options.wanted) - optional):
        raise SystemExit(
            f"gpu_bundle: --with takes {', '.join(sorted(optional))}; got {', '.join(unknown)}"
        )
    return packages


def vllm_wheel(version: str, machine: Machine, folder: Path) -> Path:
    """Returns the wheel of vLLM's CUDA build, downloaded unless a file was named."""
    if version.endswith(".whl"):
        return Path(version)
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (supported,) = project["optional-dependencies"]["cuda"]
    if not Requirement(supported).specifier.contains(version):
        raise SystemExit(f"gpu_bundle: this project supports {supported}, got --vllm {version}")
    machine.download([f"vllm=={version}"], folder)
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def build_wheel(folder: Path) -> Path:
    """Builds this project's wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*command, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_model(model: Path, folder: Path) -> None:
    """Copies what a model's folder has beside weights: configuration and tokenizer."""
    if not (model / "config.json").is_file():
        raise SystemExit(f"gpu_bundle: expected {model / 'config.json'}; --model takes a folder")
    folder.mkdir()
    for path in sorted(path for pattern in MODEL_FILES for path in model.glob(pattern)):
        shutil.copy(path, folder)


def unpack(options: argparse.Namespace) -> int:
    """Installs a bundle, tries imports, and returns 1 if one failed."""
    description = archive.read_description(options.unpack)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if description["python"] != version:
        raise SystemExit(
            f"gpu_bundle: expected Python {description['python']}, for which this bundle was "
            f"packed, and runs under {version}; pack again with --python python{version}"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        archive.unpack(options.unpack, folder)
        install(sorted((folder / "wheels").glob("*.whl")), options.target)
        if (folder / "model").is_dir():
            model = options.unpack / "model"
            shutil.copytree(folder / "model", model, dirs_exist_ok=True)
            print(f"gpu_bundle: the model without weights is {model} (--load-format dummy)")
    if python("import flashinfer", options.target).returncode:
        print(
            "gpu_bundle: flashinfer cannot be imported; set VLLM_USE_FLASHINFER_SAMPLER=0, without "
            "which vLLM does not start on CUDA then"
        )
    return try_imports(description["extensions"], options.target)


def install(wheels: Sequence[Path], target: Path | None) -> None:
    """Installs these wheels, and asks no index."""
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet"]
    if target is not None:
        options += ["--upgrade", "--target", str(target)]
    print(f"gpu_bundle: installs {len(wheels)} wheels")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)


def try_imports(extensions: Sequence[str], target: Path | None) -> int:
    """Imports modules in processes of their own, tells how that went; 1 if one failed.

    Compiled modules need CUDA, so they are tried where torch is built for it.
    """
    modules = list(IMPORTS)
    if python("import torch; print(torch.version.cuda or '')", target).stdout.strip():
        modules += extensions
    else:
        print(f"gpu_bundle: torch has no CUDA here; not tried: {', '.join(extensions)}")
    failed = 0
    for module in modules:
        done = python(f"import torch, {module}", target)
        failed |= done.returncode != 0
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        print(f"gpu_bundle: {module}: {said if done.returncode else 'imported'}", flush=True)
    return int(failed)


def python(code: str, target: Path | None) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process that finds what was installed."""
    paths = [str(target or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", code]
    # Away from the clone, whose package would hide the one that was installed.
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Packs or unpacks; 0 if all went well."""
    options = parse(arguments)
    try:
        if options.unpack:
            return unpack(options)
        pack(options)
    except (ValueError, FileNotFoundError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"gpu_bundle: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
