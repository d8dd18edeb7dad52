"""Copies between host and device that do not wait for the device's work."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(numbers: np.ndarray[Any, Any] | list[int] | Tensor, device: torch.device) -> Tensor:
    """Copies the host's numbers, a list as int64, to a device; on the CPU returns them uncopied.

    A copy from ordinary memory would wait until the device has done all its work, so it goes
    through page-locked memory.
    """
    if isinstance(numbers, list):
        numbers = np.array(numbers, dtype=np.int64)
    tensor = numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Download:
    """A [] integer on its way from a device, which may still compute it, to the host."""

    def __init__(self, number: Tensor) -> None:
        self._number = number
        self._arrival: torch.cuda.Event | None = None
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(number.device))

    @property
    def value(self) -> int | None:
        """The number; None until it has arrived."""
        if self._number.is_meta or (self._arrival is not None and not self._arrival.query()):
            return None
        return int(self._number)
