"""Rows of page ids that take memory as each is long, whatever the longest one is.

    row of (layer, slot, head):  [ run 5 ][ run 2 ][ run 9 ]     RUN columns each

All layers and heads of a slot have the same runs, which follow from numbers that the host knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.rounding import ceil_div

RUN = 64
Integers = np.ndarray[Any, np.dtype[np.int64]]


class PageRows:
    """Page ids by layer, slot, head and column.

    Attributes:
        runs: [num_layers, any, num_heads, RUN] int32; the first run is nobody's.
        num_runs: [slots] int64 that each slot has.
    """

    def __init__(self, num_layers: int, num_heads: int, device: torch.device) -> None:
        self.runs = torch.zeros((num_layers, 1, num_heads, RUN), dtype=torch.int32, device=device)
        self.num_runs: Integers = np.zeros(0, dtype=np.int64)
        self._layers = torch.arange(num_layers, device=device)[:, None, None, None]
        self._heads = torch.arange(num_heads, device=device)[:, None]
        self._free: list[int] = []
        # Likewise on the host; uploaded when they are read.
        self._numbers: Integers = np.zeros((0, 0), dtype=np.int64)
        self._device_numbers: Tensor | None = None

    def add_slots(self, num_slots: int) -> None:
        """Makes room for as many slots altogether."""
        missing = num_slots - len(self.num_runs)
        self.num_runs = np.pad(self.num_runs, (0, missing))
        self._numbers = np.pad(self._numbers, ((0, missing), (0, 0)))
        self._device_numbers = None

    def reserve(self, slot: int, width: int) -> None:
        """Makes a slot's rows at least so many columns wide."""
        have, need = int(self.num_runs[slot]), ceil_div(width, RUN)
        if need <= have:
            return
        if need > self._numbers.shape[1]:
            self._numbers = np.pad(self._numbers, ((0, 0), (0, need - self._numbers.shape[1])))
        self._numbers[slot, have:need] = [self._take() for _ in range(need - have)]
        self.num_runs[slot] = need
        self._device_numbers = None

    def shorten(self, slot: int, width: int) -> None:
        """Gives back what a slot has behind so many columns; later steps may give it others."""
        have, need = int(self.num_runs[slot]), ceil_div(width, RUN)
        if need < have:
            self._free += self._numbers[slot, need:have].tolist()
            self._numbers[slot, need:have] = 0
            self.num_runs[slot] = need
            self._device_numbers = None

    def write(
        self, layers: int | Tensor, slots: int | Tensor, heads: Tensor, columns: Tensor, ids: Tensor
    ) -> None:
        """Sets page ids at places that have room; all arguments are broadcast."""
        runs = self.run_numbers[slots, columns // RUN]
        self.runs[layers, runs, heads, columns % RUN] = ids.to(torch.int32)

    def write_all(self, slot: int, table: Tensor) -> None:
        """Sets the first columns of all rows of a slot to [num_layers, num_heads, width]."""
        columns = torch.arange(table.shape[2], device=table.device)
        self.write(self._layers[..., 0], slot, self._heads, columns, table)

    def read(self, slots: Tensor, width: int, layers: slice = slice(None)) -> Tensor:
        """[layers, R, num_heads, columns] int32 page ids (a copy), zeros where there is no room.

        Args:
            slots: [R] int64, beside the pages.
            width: columns; there are as many more as make whole runs.
            layers: of which.
        """
        numbers = self.run_numbers[slots, : ceil_div(width, RUN)]
        missing = ceil_div(width, RUN) - numbers.shape[1]
        if missing > 0:
            numbers = torch.nn.functional.pad(numbers, (0, missing))
        return self.runs[self._layers[layers], numbers[:, None], self._heads].flatten(3)

    @property
    def run_numbers(self) -> Tensor:
        """[slots, any] int64 runs of each slot in order, 0 behind the last; beside the rows."""
        if self._device_numbers is None:
            self._device_numbers = upload(self._numbers.copy(), self.runs.device)
        return self._device_numbers

    def _take(self) -> int:
        if not self._free:
            old = self.runs.shape[1]
            added = max(8, old // 4)
            more = self.runs.new_zeros((self.runs.shape[0], added, *self.runs.shape[2:]))
            self.runs = torch.cat((self.runs, more), dim=1)
            self._free = list(range(old + added - 1, old - 1, -1))
        return self._free.pop()
