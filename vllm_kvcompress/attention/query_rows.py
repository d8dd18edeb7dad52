"""Rows of a step's queries and outputs that belong to some of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.transfers import upload

HostPlaces = np.ndarray[Any, np.dtype[np.int64]]
Places: TypeAlias = Tensor | slice
EVERY_ROW = slice(None)


def places(numbers: HostPlaces, device: torch.device) -> Places:
    """Row numbers on a device; a slice where they follow one another, which copies no rows."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return upload(numbers, device)


@contextmanager
def rows_at(where: Places, queries: Tensor, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of queries, and their outputs to be written; these are put in place at the end."""
    if where is EVERY_ROW:
        yield queries, outputs
        return
    mine = queries[where]
    if isinstance(where, slice):
        yield mine, outputs[where]
        return
    written = torch.empty_like(mine)
    yield mine, written
    outputs[where] = written
