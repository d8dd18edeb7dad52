"""Packs a folder into parts of limited size, and unpacks them.

    DIR/bundle.json         what the bundle is for, and name, size and SHA-256 of each part
    DIR/bundle.tar.xz.000   parts of one compressed stream, to be read one after the other
    DIR/bundle.tar.xz.001   ...

Files larger than a part run on in the next one. Needs the standard library alone, since a machine
that unpacks has little else; with tqdm it shows how far it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

try:
    from tqdm import tqdm
except ImportError:  # on a machine that lacks it the bundle brings it
    tqdm = None

CHUNK_BYTES = 1 << 20
DESCRIPTION = "bundle.json"
STREAM = "bundle.tar.xz"


class PartWriter(io.RawIOBase):
    """Writes a stream into numbered files of limited size.

    Args:
        folder: where the files go.
        max_bytes: of one file.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__()
        self.parts: list[dict[str, Any]] = []
        self._folder = folder
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def writable(self) -> bool:
        """Returns True: bytes can be written."""
        return True

    def write(self, data: Any) -> int:
        """Writes all bytes, beginning new files where one is full."""
        rest = memoryview(data).cast("B")
        num_written = len(rest)
        while rest:
            if self._file is None:
                self._begin_part()
            piece = rest[: self._max_bytes - self._num_bytes]
            cast(BinaryIO, self._file).write(piece)
            self._hash.update(piece)
            self._num_bytes += len(piece)
            rest = rest[len(piece) :]
            if self._num_bytes == self._max_bytes:
                self._end_part()
        return num_written

    def close(self) -> None:
        """Finishes the part that is being written."""
        if self._file is not None:
            self._end_part()
        super().close()

    def _begin_part(self) -> None:
        name = f"{STREAM}.{len(self.parts):03d}"
        self._file = (self._folder / name).open("wb")
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self.parts.append({"name": name})

    def _end_part(self) -> None:
        cast(BinaryIO, self._file).close()
        self._file = None
        self.parts[-1].update(bytes=self._num_bytes, sha256=self._hash.hexdigest())


class PartReader(io.RawIOBase):
    """Reads several files as one stream."""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self._paths = iter(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        """Returns True: bytes can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, if only in part; 0 behind the last file."""
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return 0
                self._file = path.open("rb")
            num_read = self._file.readinto(buffer)  # type: ignore[attr-defined]
            if num_read:
                return int(num_read)
            self._file.close()
            self._file = None


def pack(source: Path, out: Path, max_bytes: int, description: dict[str, Any]) -> list[Path]:
    """Writes all files below a folder to parts, and what they are to bundle.json.

    Args:
        source: the folder.
        out: the folder of the parts; older parts in it go.
        max_bytes: of a part.
        description: what bundle.json holds beside the parts.

    Returns:
        The parts, in order.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{STREAM}.*"):
        old.unlink()
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    writer = PartWriter(out, max_bytes)
    with (
        writer,
        lzma.open(cast(BinaryIO, writer), "wb") as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as archive,
    ):
        for path, chunks in zip(paths, _with_progress(paths), strict=True):
            info = archive.gettarinfo(path, path.relative_to(source).as_posix())
            archive.addfile(info, chunks)
    text = json.dumps({**description, "parts": writer.parts}, indent=2)
    (out / DESCRIPTION).write_text(text + "\n")
    return [out / part["name"] for part in writer.parts]


def _with_progress(paths: list[Path]) -> Iterator[BinaryIO]:
    """Opens the files in turn, with one progress bar over their total size."""
    total = sum(path.stat().st_size for path in paths)
    if tqdm is None:
        for path in paths:
            with path.open("rb") as file:
                yield file
        return
    from tqdm.utils import CallbackIOWrapper

    with tqdm(total=total, unit="B", unit_scale=True, desc="compressing") as bar:
        for path in paths:
            with path.open("rb") as file:
                yield CallbackIOWrapper(bar.update, file, "read")


def read_description(folder: Path) -> dict[str, Any]:
    """Reads bundle.json of a bundle's folder.

    Raises:
        FileNotFoundError: where there is no bundle.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(
            f"expected {path}: copy {DESCRIPTION} and all {STREAM}.* into one folder"
        )
    return cast(dict[str, Any], json.loads(path.read_text()))


def unpack(folder: Path, into: Path) -> None:
    """Checks all parts, then extracts their files.

    Args:
        folder: where the parts are.
        into: the folder that the files go to.

    Raises:
        ValueError: where parts are missing or damaged.
    """
    parts = read_description(folder)["parts"]
    wrong = [part["name"] for part in _progress(parts, "checking") if not _is_whole(folder, part)]
    if wrong:
        raise ValueError(
            f"expected {len(parts)} whole parts in {folder}; missing or damaged: "
            f"{', '.join(wrong)}. Copy them there once more."
        )
    reader = io.BufferedReader(PartReader(folder / part["name"] for part in parts), CHUNK_BYTES)
    with (
        reader,
        lzma.open(reader) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in _progress(archive, "unpacking"):
            archive.extract(member, into, filter="data")


def _is_whole(folder: Path, part: dict[str, Any]) -> bool:
    """Whether a part is there and has the size and the hash that it was written with."""
    path = folder / part["name"]
    if not path.is_file() or path.stat().st_size != part["bytes"]:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == part["sha256"]


def _progress(items: Iterable[Any], title: str) -> Iterable[Any]:
    """The same items, with a progress bar where there is tqdm."""
    return items if tqdm is None else tqdm(items, desc=title)
