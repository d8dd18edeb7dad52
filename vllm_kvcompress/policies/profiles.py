"""Measured heads: HeadKV's importance scores and DuoAttention's gates, in their published files.

HeadKV: JSON `{"layer-queryhead": [scores, ...], ...}`, a head's importance is their mean.
DuoAttention: `full_attention_heads.tsv`, one line of gates per layer and a column per KV head,
and beside it `config.json` with `sink_size` and `recent_size`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError

HEADKV = "headkv"
DUOATTENTION = "duoattention"
_HOW = "`vllm-kvcompress profile` makes one for any model"


@dataclass(frozen=True)
class HeadProfile:
    """A profile as it was read.

    Attributes:
        kind: headkv or duoattention.
        rows: values by layer and head (query heads for headkv, KV heads for duoattention).
        temperature: headkv only: scores are raised to this power before normalising.
        num_sinks: duoattention only: first tokens that streaming heads keep.
        num_recent: duoattention only: last tokens that streaming heads keep.
    """

    kind: str
    rows: tuple[tuple[float, ...], ...]
    temperature: float = 1.0
    num_sinks: int = 128
    num_recent: int = 256


def load_headkv(path: Path, temperature: float) -> HeadProfile:
    """Reads a HeadKV importance file.

    Raises:
        ConfigError: no such file, not the format, heads missing or values not finite.
    """
    entries = _json(path)
    means: dict[tuple[int, int], float] = {}
    for key, scores in entries.items():
        try:
            layer, head = (int(part) for part in key.split("-"))
            values = [float(score) for score in scores]
            means[layer, head] = sum(values) / len(values)
        except (ValueError, TypeError, ZeroDivisionError):
            raise ConfigError(
                f'{path}: expected "layer-head": [scores], found {key!r}: {scores!r}; {_HOW}.'
            ) from None
    num_layers = 1 + max((layer for layer, _ in means), default=-1)
    num_heads = 1 + max((head for _, head in means), default=-1)
    if len(means) != num_layers * num_heads or not means:
        raise ConfigError(
            f"{path}: expected every head of every layer, found {len(means)} of "
            f"{num_layers} x {num_heads}; {_HOW}."
        )
    rows = tuple(tuple(means[la, h] for h in range(num_heads)) for la in range(num_layers))
    _check_finite(path, rows)
    return HeadProfile(HEADKV, rows, temperature=temperature)


def load_duoattention(path: Path) -> HeadProfile:
    """Reads a DuoAttention pattern: the TSV file, or the directory that holds it.

    Raises:
        ConfigError: no such file, not the format, or lines of different lengths.
    """
    table = path / "full_attention_heads.tsv" if path.is_dir() else path
    try:
        lines = [line.split() for line in table.read_text().splitlines() if line.strip()]
        rows = tuple(tuple(float(gate) for gate in line) for line in lines)
    except OSError as error:
        raise ConfigError(f"{table}: cannot be read ({error.strerror}); {_HOW}.") from None
    except ValueError as error:
        raise ConfigError(
            f"{table}: expected gates as numbers, one line per layer ({error}); {_HOW}."
        ) from None
    if not rows or len({len(row) for row in rows}) != 1:
        raise ConfigError(f"{table}: expected lines with one gate per KV head each; {_HOW}.")
    _check_finite(table, rows)
    sizes = _json(table.parent / "config.json")
    try:
        sinks, recent = int(sizes["sink_size"]), int(sizes["recent_size"])
        if min(sinks, recent) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{table.parent / 'config.json'}: expected sink_size and recent_size, in tokens, "
            f"found {sizes}; {_HOW}."
        ) from None
    clipped = tuple(tuple(min(1.0, max(0.0, gate)) for gate in row) for row in rows)
    return HeadProfile(DUOATTENTION, clipped, num_sinks=sinks, num_recent=recent)


def bind_profile(
    profile: HeadProfile,
    num_layers: int,
    num_kv_heads: int,
    num_query_heads: int,
    tp_rank: int,
    tp_size: int,
) -> tuple[str, tuple[tuple[float, ...], ...]]:
    """A profile's values for one rank's KV heads, and the allocator field they belong in.

    Ranks have equal budgets, each for its own heads, so importance is relative to the rank's sum.

    Raises:
        ConfigError: the profile has other layers or heads than the model.
    """
    per_rank = num_query_heads if profile.kind == HEADKV else num_kv_heads
    expected = (num_layers, per_rank * tp_size)
    found = (len(profile.rows), len(profile.rows[0]))
    if found != expected:
        what = "query" if profile.kind == HEADKV else "KV"
        raise ConfigError(
            f"the profile has {found[0]} layers of {found[1]} {what} heads, the model has "
            f"{expected[0]} of {expected[1]}; {_HOW}."
        )
    rows = [row[tp_rank * per_rank : (tp_rank + 1) * per_rank] for row in profile.rows]
    if profile.kind == DUOATTENTION:
        return "gates", tuple(rows)
    group = num_query_heads // num_kv_heads
    powered = [[max(0.0, score) ** profile.temperature for score in row] for row in rows]
    means = [
        [sum(row[h * group : (h + 1) * group]) / group for h in range(num_kv_heads)]
        for row in powered
    ]
    total = sum(map(sum, means))
    if total <= 0:
        return "table", tuple((1.0 / (num_layers * num_kv_heads),) * num_kv_heads for _ in rows)
    return "table", tuple(tuple(value / total for value in row) for row in means)


def _json(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {_HOW}.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON ({error}); {_HOW}.") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(entries).__name__}.")
    return entries


def _check_finite(path: Path, rows: tuple[tuple[float, ...], ...]) -> None:
    if not all(math.isfinite(value) for row in rows for value in row):
        raise ConfigError(f"{path}: expected finite numbers; {_HOW}.")
