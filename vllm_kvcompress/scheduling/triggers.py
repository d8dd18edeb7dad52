"""Triggers: when requests are compressed, such as `prompt`, `chunk:1024` or `pressure:0.9`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, Self, cast

from vllm_kvcompress.errors import ConfigError

TriggerKind = Literal["prompt", "chunk", "decode", "pressure"]

DEFAULT_CHUNK_TOKENS = 1024
DEFAULT_PRESSURE_MARK = 0.9


@dataclass(frozen=True)
class Trigger:
    """Condition under which a request is compressed.

    Attributes:
        kind: prompt (once, when the prompt has been read), chunk (at an interval of prompt tokens,
            so that memory stays bounded), decode (at an interval of generated tokens), or
            pressure (while the pool is fuller than a mark, or a request waits for room).
        every: tokens between two events; None for prompt and pressure.
        mark: used part of the pool, for pressure.
    """

    kind: TriggerKind
    every: int | None = None
    mark: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses one trigger from its text, such as `decode:256`.

        Raises:
            ConfigError: no such trigger, or a number that is missing, unwanted or wrong.
        """
        kind, _, number = text.strip().partition(":")
        if kind == "prompt" and not number:
            return cls("prompt")
        if kind == "pressure" and 0 < _float(number or DEFAULT_PRESSURE_MARK) < 1:
            return cls("pressure", mark=_float(number or DEFAULT_PRESSURE_MARK))
        every = number or (str(DEFAULT_CHUNK_TOKENS) if kind == "chunk" else "")
        if kind in ("chunk", "decode") and re.fullmatch("[0-9]{1,15}", every) and int(every):
            return cls(cast(TriggerKind, kind), int(every))
        raise ConfigError(_refusal(text))

    def __str__(self) -> str:
        number = self.every if self.mark is None else f"{self.mark:g}"
        return self.kind if number is None else f"{self.kind}:{number}"


def parse_triggers(value: object) -> tuple[Trigger, ...]:
    """Parses triggers from `"prompt,decode:256"` or from a list of such texts.

    Raises:
        ConfigError: none given, one of them wrong, or one kind given twice.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(_refusal(value))
    triggers = tuple(map(Trigger.parse, parts))
    if not triggers or len({trigger.kind for trigger in triggers}) < len(triggers):
        raise ConfigError(_refusal(value))
    return triggers


def _float(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _refusal(value: object) -> str:
    return (
        "expected triggers joined by commas, each kind once: prompt, chunk or chunk:N, decode:N "
        f"(N tokens between two events), pressure:0.9 (above 0, below 1); found {value!r}."
    )
