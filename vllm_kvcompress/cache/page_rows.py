"""Rows of page ids, stored in runs of columns so that a long request does not widen other rows.

    row of (layer, slot, head):  [ run 5 ][ run 2 ][ run 9 ]     RUN columns each

All layers and heads of a slot use the same runs, so the host alone decides which ones.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import Integers
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.rounding import ceil_div

RUN = 64


class PageIdRows:
    """Page ids by layer, slot, head and column.

    Attributes:
        runs: [num_layers, any, num_heads, RUN] int32 page ids; no slot owns the first run.
        num_runs: [slots] int64 runs of each slot.
    """

    def __init__(self, num_layers: int, num_heads: int, device: torch.device) -> None:
        self.runs = torch.zeros((num_layers, 1, num_heads, RUN), dtype=torch.int32, device=device)
        self.num_runs: Integers = np.zeros(0, dtype=np.int64)
        self._layers = torch.arange(num_layers, device=device)[:, None, None, None]
        self._heads = torch.arange(num_heads, device=device)[:, None]
        self._free: list[int] = []
        self._run_numbers: Integers = np.zeros((0, 0), dtype=np.int64)
        self._device_run_numbers: Tensor | None = None  # uploaded when needed

    def add_slots(self, num_slots: int) -> None:
        """Grows to `num_slots` slots in total."""
        missing = num_slots - len(self.num_runs)
        self.num_runs = np.pad(self.num_runs, (0, missing))
        self._run_numbers = np.pad(self._run_numbers, ((0, missing), (0, 0)))
        self._device_run_numbers = None

    def reserve(self, slot: int, width: int) -> None:
        """Makes a slot's rows at least `width` columns wide."""
        have, need = int(self.num_runs[slot]), ceil_div(width, RUN)
        if need <= have:
            return
        missing = max(0, need - self._run_numbers.shape[1])
        self._run_numbers = np.pad(self._run_numbers, ((0, 0), (0, missing)))
        self._run_numbers[slot, have:need] = [self._allocate_run() for _ in range(need - have)]
        self.num_runs[slot] = need
        self._device_run_numbers = None

    def shorten(self, slot: int, width: int) -> None:
        """Frees a slot's runs behind the first `width` columns for other slots."""
        have, need = int(self.num_runs[slot]), ceil_div(width, RUN)
        if need < have:
            self._free += self._run_numbers[slot, need:have].tolist()
            self._run_numbers[slot, need:have] = 0
            self.num_runs[slot] = need
            self._device_run_numbers = None

    def write(
        self, layers: int | Tensor, slots: int | Tensor, heads: Tensor, columns: Tensor, ids: Tensor
    ) -> None:
        """Sets page ids in reserved columns; all arguments are broadcast."""
        runs = self.run_numbers[slots, columns // RUN]
        self.runs[layers, runs, heads, columns % RUN] = ids.to(torch.int32)

    def write_all(self, slot: int, table: Tensor) -> None:
        """Sets the first columns of all rows of a slot to [num_layers, num_heads, width] ids."""
        columns = torch.arange(table.shape[2], device=table.device)
        self.write(self._layers[..., 0], slot, self._heads, columns, table)

    def read(self, slots: Tensor, width: int, layers: slice = slice(None)) -> Tensor:
        """Copies [layers, R, num_heads, columns] int32 page ids, zeros where no run is reserved.

        Args:
            slots: [R] int64 slots, on the device.
            width: columns to read, rounded up to a multiple of RUN.
            layers: layers to read.
        """
        numbers = self.run_numbers[slots, : ceil_div(width, RUN)]
        missing = ceil_div(width, RUN) - numbers.shape[1]
        if missing > 0:
            numbers = torch.nn.functional.pad(numbers, (0, missing))
        return self.runs[self._layers[layers], numbers[:, None], self._heads].flatten(3)

    @property
    def run_numbers(self) -> Tensor:
        """[slots, any] int64 runs of each slot in order, then 0; on the device."""
        if self._device_run_numbers is None:
            self._device_run_numbers = upload(self._run_numbers.copy(), self.runs.device)
        return self._device_run_numbers

    def _allocate_run(self) -> int:
        if not self._free:
            old = self.runs.shape[1]
            added = max(8, old // 4)
            more = self.runs.new_zeros((self.runs.shape[0], added, *self.runs.shape[2:]))
            self.runs = torch.cat((self.runs, more), dim=1)
            self._free = list(range(old + added - 1, old - 1, -1))
        return self._free.pop()
