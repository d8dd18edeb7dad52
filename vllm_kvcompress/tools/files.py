"""Results on disk: whole or not at all, and one sentence where that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_kvcompress.errors import ConfigError, FileError

MOST_BYTES = 256 * 2**20  # of data, and of what earlier runs answered


@contextmanager
def named(path: Path) -> Iterator[None]:
    """What goes wrong with a file inside is said in one sentence that names it.

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


def read_within(path: Path, most_bytes: int | None = None, errors: str = "strict") -> str:
    """A file's text, of at most MOST_BYTES unless said otherwise.

    Raises:
        ConfigError: it is larger than a file of its kind can be.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no text.
    """
    most = MOST_BYTES if most_bytes is None else most_bytes
    with path.open("rb") as file:
        found = file.read(most + 1)  # of a device that never ends, too
    if len(found) > most:
        raise ConfigError(
            f"{path}: expected at most {most} bytes, found more; give a smaller file."
        )
    return found.decode(errors=errors)


def make_folder(path: Path) -> None:
    """Makes a folder, and those around it.

    Raises:
        FileError: it cannot be made.
    """
    with named(path):
        path.mkdir(parents=True, exist_ok=True)


def check_writable(path: Path) -> None:
    """Makes the folder of a result, and sees whether it can be written there; leaves nothing else.

    Raises:
        FileError: it cannot.
    """
    make_folder(path.parent)
    with named(path):
        if path.exists() and not path.is_file():
            path.open("a").close()  # a folder, or a device
        else:
            partial = _partial(path.resolve())
            partial.touch()
            partial.unlink()


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that whoever reads it finds the former text or the new one, never a part.

    Its folder is made if there is none.
    What is no ordinary file, such as /dev/stdout, is written to as it is.

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
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def append(path: Path, text: str) -> None:
    """Adds all of a text to a file, or nothing.

    Raises:
        FileError: it cannot be written.
    """
    left = memoryview(text.encode())
    with named(path), path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(begin)
            raise
