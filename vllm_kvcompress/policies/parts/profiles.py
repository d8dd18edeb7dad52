"""Files of measured heads, which HeadKV and DuoAttention read."""

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

Table = tuple[tuple[float, ...], ...]  # a number per layer and head
MAX_BYTES = 64 * 2**20  # of a file; 128 layers of 128 heads take a third of it


def refusal(about: Path | str, reason: str) -> ConfigError:
    """Error about a profile, which says how to make another."""
    return ConfigError(f"{about}: {reason}; `vllm-kvcompress profile` makes one for any model.")


def read_bytes(path: Path) -> bytes:
    """Reads a profile file; raises like `read_text`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise refusal(path, f"expected at most {MAX_BYTES} bytes, found more")
    return content


def read_text(path: Path) -> str:
    """Reads a profile file.

    Raises:
        ConfigError: the file cannot be read, or is larger than a profile can be.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise refusal(path, f"expected text ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a profile file that holds a JSON object.

    Raises:
        ConfigError: there is no such file, or it holds no JSON object.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"expected JSON ({error})") from None
    if not isinstance(content, dict):
        raise refusal(path, f"expected a JSON object, found {type(content).__name__}")
    return content


def check_finite(path: Path, table: Table) -> None:
    """Refuses a file with NaN or infinity in it."""
    if not all(math.isfinite(value) for row in table for value in row):
        raise refusal(path, "expected finite numbers")


def rows_of_rank(table: Table, model: ModelHeads, per_rank: int, kind: str) -> Table:
    """Cuts this rank's layers and `per_rank` heads, of a kind, out of a table of the model's.

    Raises:
        ConfigError: the table has other layers or heads than the model.
    """
    expected = (model.num_layers_of_model, per_rank * model.tp_size)
    shape = (len(table), len(table[0]))
    if shape != expected:
        raise refusal(
            "the profile",
            f"expected {expected[0]} layers of {expected[1]} {kind} heads, as the model has, found "
            f"{shape[0]} of {shape[1]}",
        )
    heads = slice(model.tp_rank * per_rank, (model.tp_rank + 1) * per_rank)
    return tuple(row[heads] for row in table[model.own_layers])


@lru_cache(maxsize=1024)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.float64), device)


def of_layers(table: Table | dict[int, tuple[float, ...]], view: LayerView) -> Tensor:
    """[R, heads] fp64 numbers of the view's heads, from a table by layer and head."""
    numbers = tuple(number for layer in view.layers for number in table[layer])
    return view.for_requests(_on_device(numbers, view.device).view(len(view.layers), -1))
