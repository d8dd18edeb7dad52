"""Reads and writes result files: complete or not at all, with one sentence where that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_kvcompress.errors import ConfigError, FileError

MAX_FILE_BYTES = 256 * 2**20  # for data files, and for answers of earlier runs


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Turns an OSError inside into one sentence that names the file.

    Raises:
        FileError: the disk is full, a folder is missing, reading or writing is not allowed.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FileError(
            f"{path}: {reason}; expected a file that can be read and written, on a disk with room."
        ) from None


def read_within(path: Path, max_bytes: int | None = None, errors: str = "strict") -> str:
    """Reads a text file of limited size.

    Raises:
        ConfigError: it is larger than `max_bytes`.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no text.
    """
    limit = MAX_FILE_BYTES if max_bytes is None else max_bytes
    with path.open("rb") as file:
        content = file.read(limit + 1)  # not all: a device may never end
    if len(content) > limit:
        raise ConfigError(
            f"{path}: expected at most {limit} bytes, found more; give a smaller file."
        )
    return content.decode(errors=errors)


def make_folder(path: Path) -> None:
    """Makes a folder with its parents, or raises FileError."""
    with named(path):
        path.mkdir(parents=True, exist_ok=True)


def check_writable(path: Path) -> None:
    """Makes a result's folder and checks that the result can be written, or raises FileError."""
    make_folder(path.parent)
    with named(path):
        if path.exists() and not path.is_file():
            path.open("a").close()  # a folder, or a device
        else:
            partial = _partial(path.resolve())
            partial.touch()
            partial.unlink()


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that readers see the former text or the new one, never a part.

    Makes the folder. What is no ordinary file, such as /dev/stdout, is written to directly.

    Raises:
        FileError: it cannot be written.
    """
    make_folder(path.parent)
    with named(path):
        target = path.resolve()
        if target.exists() and not target.is_file():
            target.write_text(text)
            return
        partial = _partial(target)
        try:
            with partial.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """The temporary name of a file while it is written."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def append(path: Path, text: str) -> None:
    """Appends all of a text to a file, or nothing.

    Raises:
        FileError: it cannot be written.
    """
    unwritten = memoryview(text.encode())
    with named(path), path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        except OSError:
            file.truncate(begin)
            raise
