"""Texts whose continuation a model predicts: of several kinds that come with Python, or a user's.

Every token after the compressed context is an observation, and no task has to be within a small
model's reach, so a policy's cost shows with few texts.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.files import read_within

CHARACTERS_PER_TOKEN = 6  # more than tokenizers make of any of these texts
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)


def _manual() -> Iterator[str]:
    """The language reference, as `help()` shows it."""
    from pydoc_data import topics

    yield "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def _source() -> Iterator[str]:
    """The standard library's code, without its docstrings."""
    for code in _modules():
        yield _DOCSTRING.sub("", code)


def _prose() -> Iterator[str]:
    """The standard library's docstrings, one after the other."""
    yield _prose_of(*_modules())


def _prose_of(*codes: str) -> str:
    """The docstrings of modules, other than short ones."""
    docstrings = [text.strip() for code in codes for text in _DOCSTRING.findall(code)]
    return "\n\n".join(re.sub(r"\n +", "\n", text) for text in docstrings if len(text) > 200)


def _tables() -> Iterator[str]:
    """Code pages: a line per character, with its number and its name; without ASCII's."""
    pages = map(_code_page, sorted((_LIBRARY / "encodings").glob("*.py")))
    yield "\n".join(page for page in pages if page)


def _code_page(path: Path) -> str:
    """The table of one module of encodings; empty where it has none."""
    table = path.read_text().partition("decoding_table = (\n")[2].partition("\n)")[0]
    return "\n".join(table.splitlines()[128:])


def _modules() -> Iterator[str]:
    """The source code of those modules in `modules.txt` that this Python has."""
    for name in Path(__file__).with_name("modules.txt").read_text().split():
        module = _LIBRARY / f"{name.replace('.', '/')}.py"
        for path in (module, module.with_suffix("") / "__init__.py"):
            if path.exists():
                yield path.read_text()
                break


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "prose": _prose,
    "manual": _manual,
    "source": _source,
    "tables": _tables,
}


def pieces(kind: str, num_tokens: int, first: int, count: int) -> list[str]:
    """Pieces of one kind in KINDS, none of which overlaps another.

    Args:
        kind: a name in KINDS.
        num_tokens: minimum length of each piece, by a generous estimate.
        first: number of the first piece; numbers beyond the last begin again.
        count: how many pieces.

    Raises:
        ConfigError: there are fewer than `count`.
    """
    texts = [piece for text in KINDS[kind]() for piece in cut(text, num_tokens)]
    if len(texts) < count:
        raise ConfigError(
            f"--samples {count}: text/{kind} has {len(texts)} pieces of {num_tokens} tokens; ask "
            "for fewer, or for shorter ones."
        )
    random.Random(kind).shuffle(texts)
    return [texts[(first + number) % len(texts)] for number in range(count)]


def documents(kind: str, num_tokens: int) -> list[str]:
    """Beginnings of different texts of one kind, no two of one module, page or topic.

    `prose` and `source` are of other modules than each other, of the whole standard library. Every
    second piece of the manual is left out, since neighbours tell of the same things.

    Args:
        kind: a name in KINDS.
        num_tokens: each has at least as many, by a generous estimate.
    """
    size = CHARACTERS_PER_TOKEN * num_tokens
    if kind == "manual":
        (text,) = _manual()
        return cut(text, num_tokens)[::2]
    if kind == "tables":
        tables = map(_code_page, sorted((_LIBRARY / "encodings").glob("*.py")))
        return [table[:size] for table in tables if table]
    codes = [path.read_text(errors="replace") for path in _library_modules()]
    proses = [_prose_of(code) for code in codes]
    if kind == "prose":
        return [prose[:size] for prose in proses if len(prose) >= size]
    sources = [
        _DOCSTRING.sub("", code)
        for code, prose in zip(codes, proses, strict=True)
        if len(prose) < size
    ]
    return [source[:size] for source in sources if len(source) >= size]


def _library_modules() -> list[Path]:
    """The standard library's modules, without tests, tables and what is installed beside it."""
    other = {"site-packages", "test", "tests", "encodings", "pydoc_data", "idle_test"}
    paths = sorted(_LIBRARY.rglob("*.py"))
    return [path for path in paths if not other & set(path.relative_to(_LIBRARY).parts)]


def cut(text: str, num_tokens: int) -> list[str]:
    """Splits a text into consecutive pieces, each from the beginning of a line."""
    size = CHARACTERS_PER_TOKEN * num_tokens
    texts, start = [], 0
    while start + size <= len(text):
        texts.append(text[start : start + size])
        start = text.find("\n", start + size) + 1 or len(text)
    return texts


def read(path: Path) -> str:
    """Reads a user's file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_within(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: cannot be read ({error}); check the path.") from None
