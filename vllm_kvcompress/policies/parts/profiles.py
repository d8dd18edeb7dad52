"""Files of measured heads, as HeadKV and DuoAttention read them."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies.base import LayerView, ModelHeads

Table = tuple[tuple[float, ...], ...]  # numbers by layer and head
HOW = "`vllm-kvcompress profile` makes one for any model"


MOST_BYTES = 64 * 2**20  # of a profile: that of 128 layers of 128 heads takes a third of it


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: it cannot be read, or is larger than a profile can be.
    """
    try:
        with path.open("rb") as file:
            found = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {HOW}.") from None
    if len(found) > MOST_BYTES:
        raise ConfigError(f"{path}: expected at most {MOST_BYTES} bytes, found more; {HOW}.")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text ({error}); {HOW}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        ConfigError: no such file, or no JSON object.
    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON ({error}); {HOW}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(found).__name__}.")
    return found


def check_finite(path: Path, table: Table) -> None:
    """Refuses a file with numbers that are none."""
    if not all(math.isfinite(value) for row in table for value in row):
        raise ConfigError(f"{path}: expected finite numbers; {HOW}.")


def rows_of_rank(table: Table, model: ModelHeads, per_rank: int, kind: str) -> Table:
    """The columns of this rank's heads.

    Args:
        table: as it was read, for all heads of the model.
        model: what it must fit.
        per_rank: heads of this rank.
        kind: of heads, for the error.

    Raises:
        ConfigError: the table has other layers or heads than the model.
    """
    expected = (model.num_layers, per_rank * model.tp_size)
    found = (len(table), len(table[0]))
    if found != expected:
        raise ConfigError(
            f"the profile has {found[0]} layers of {found[1]} {kind} heads, the model has "
            f"{expected[0]} of {expected[1]}; {HOW}."
        )
    return tuple(row[model.tp_rank * per_rank : (model.tp_rank + 1) * per_rank] for row in table)


@lru_cache(maxsize=1024)
def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Settings of layers as a tensor, copied once."""
    return upload(torch.tensor(values, dtype=dtype), device)


def of_layers(table: Table | dict[int, tuple[float, ...]], view: LayerView) -> Tensor:
    """[R, heads] fp64 numbers of the view's heads, from those by layer and head."""
    rows = tuple(number for layer in view.layers for number in table[layer])
    found = on_device(rows, torch.float64, view.device).view(len(view.layers), -1)
    return found.expand(view.num_requests, -1)
