"""Commands that the README and the documentation show are such as the program takes."""

import re
import shlex
from pathlib import Path

import pytest

from vllm_kvcompress.cli.main import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IN_A_BLOCK = re.compile(r"^ *(vllm-kvcompress .+)$", re.MULTILINE)
IN_A_SENTENCE = re.compile(r"`(vllm-kvcompress [^`]+)`")


def commands(page: Path) -> list[str]:
    text = page.read_text().replace("\\\n", " ")
    blocks = IN_A_BLOCK.findall(text)
    return [line.partition("  #")[0] for line in blocks] + IN_A_SENTENCE.findall(text)


def is_a_form(command: str) -> bool:
    """What stands for several commands, or names one without its arguments."""
    return bool(re.search(r"\[|\.\.\.|\$\(", command)) or len(command.split()) == 2


SHOWN = sorted({command for page in PAGES for command in commands(page) if not is_a_form(command)})


def test_there_are_some() -> None:
    assert len(SHOWN) > 30


@pytest.mark.parametrize("command", SHOWN)
def test_it_is_taken(command: str) -> None:
    arguments = shlex.split(command)[1:]
    namespace, rest = _parser(arguments[0]).parse_known_args(arguments)
    assert namespace.command == arguments[0]
    assert not rest or namespace.takes_any_option
