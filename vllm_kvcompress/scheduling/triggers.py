"""When requests are compressed, as users write it: `prompt`, `chunk:1024`, `pressure:0.9`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self, cast

from vllm_kvcompress.errors import ConfigError

TriggerKind = Literal["prompt", "chunk", "decode", "pressure"]

DEFAULT_CHUNK_TOKENS = 1024
DEFAULT_PRESSURE_MARK = 0.9
TRIGGER_HELP = 'use "prompt", "chunk:N", "decode:N" or "pressure:0.9", joined by commas'


@dataclass(frozen=True)
class Trigger:
    """When a request is compressed.

    Attributes:
        kind: prompt (once, when the prompt has been read), chunk (after every so many prompt
            tokens, so that memory stays bounded), decode (after every so many generated tokens),
            pressure (while the pool is fuller than a mark, or a request waits for room).
        every: tokens between two events; None for prompt and pressure.
        mark: used part of the pool, for pressure.
    """

    kind: TriggerKind
    every: int | None = None
    mark: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "pressure":
            if self.mark is None or not 0 < self.mark < 1:
                raise ConfigError(
                    f'trigger "{self}": "pressure" needs the part of the pool from which on '
                    "requests are compressed, between 0 and 1; write for example "
                    f'"pressure:{DEFAULT_PRESSURE_MARK}".'
                )
            return
        if self.kind == "prompt":
            if self.every is not None:
                raise ConfigError(
                    f'trigger "{self}": a prompt ends only once, so it takes no number; use '
                    f'"prompt", or "decode:{self.every}" to compress while generating.'
                )
        elif not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(
                f'trigger "{self}": "{self.kind}" needs the number of tokens between two events, '
                f'a positive integer; write for example "{self.kind}:256".'
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """One trigger from its text, such as `decode:256`.

        Raises:
            ConfigError: no such trigger, or a number that is missing, unwanted or wrong.
        """
        kind, _, number = text.strip().partition(":")
        if kind == "pressure":
            mark = parse_number(number) if number else DEFAULT_PRESSURE_MARK
            return cls("pressure", mark=None if isinstance(mark, str) else float(mark))
        if kind not in ("prompt", "chunk", "decode"):
            raise ConfigError(f'unknown trigger "{text.strip()}"; {TRIGGER_HELP}.')
        if not number:
            default = DEFAULT_CHUNK_TOKENS if kind == "chunk" else None
            return cls(cast(TriggerKind, kind), default)
        if not re.fullmatch(r"[0-9]+", number):
            raise ConfigError(
                f'trigger "{text.strip()}": expected a number of tokens after the colon, found '
                f'"{number}"; write for example "decode:256".'
            )
        return cls(cast(TriggerKind, kind), int(number))

    def __str__(self) -> str:
        number = self.every if self.mark is None else f"{self.mark:g}"
        return self.kind if number is None else f"{self.kind}:{number}"


def parse_triggers(value: object) -> tuple[Trigger, ...]:
    """Triggers from `"prompt,decode:256"` or from a list of such texts.

    Raises:
        ConfigError: none given, one of them wrong, or one kind given twice.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"trigger: expected text, found {value!r}; {TRIGGER_HELP}.")
    triggers = tuple(Trigger.parse(part) for part in parts)
    kinds = [trigger.kind for trigger in triggers]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(
            f'trigger "{",".join(parts)}" names one kind twice, which has no meaning; '
            f"{TRIGGER_HELP}."
        )
    return triggers


def parse_number(text: str) -> float | int | str:
    """An int or a float if the text is one, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
