"""Commands in the README and the documentation are accepted by the program."""

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
    """Returns whether a line is a placeholder: several commands, or one without arguments."""
    return bool(re.search(r"\[|\.\.\.|\$\(", command)) or len(command.split()) == 2


SHOWN = sorted({command for page in PAGES for command in commands(page) if not is_a_form(command)})


def test_documentation_shows_commands() -> None:
    assert len(SHOWN) > 30


@pytest.mark.parametrize("command", SHOWN)
def test_documented_command_is_accepted(command: str) -> None:
    arguments = shlex.split(command)[1:]
    namespace, rest = _parser(arguments[0]).parse_known_args(arguments)
    assert namespace.command == arguments[0]
    assert not rest or namespace.takes_any_option
