"""Writes the tables of options in docs/serving.md, from the fields that state the options.

python scripts/release/option_tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.options import Options, flag_details, help_text
from vllm_kvcompress.prompts.settings import PromptRequestOptions, PromptSettings

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TABLES: dict[str, tuple[type[Options], ...]] = {
    "settings": (Settings,),
    "requests": (RequestOptions, PromptRequestOptions),
    "prompts": (PromptSettings,),
}
_TABLE = re.compile(
    r"(<!-- (\w+): scripts/release/option_tables\.py writes this -->\n\n)[^<]*(\n<!-- end)"
)


def with_tables(page: str) -> str:
    """The page with its tables written anew."""
    return _TABLE.sub(lambda match: match[1] + _table(match[2]) + match[3], page)


def _table(name: str) -> str:
    head = ("key", "meaning") if name == "requests" else ("option", "key in YAML", "meaning")
    rows = [row for options in TABLES[name] for row in _rows(options)]
    cells = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _rows(options: type[Options]) -> Iterator[tuple[str, ...]]:
    for name, field in options.model_fields.items():
        key, details = options.prefix + name, flag_details(field)
        if not options.flags:
            yield f"`{key}: {json.dumps(details['example'])}`", help_text(field)
        else:
            flag = f"`{options.flag(name)} {details['metavar']}".strip() + "`"
            yield "" if name == "prompts" else flag, f"`{key}`", help_text(field)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
