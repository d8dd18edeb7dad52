"""Between host and device, without waiting for what the device is doing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(numbers: np.ndarray[Any, Any] | list[int] | Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device; on the CPU these themselves, without a copy.

    A copy from ordinary memory would wait until the device has done all its work, so it goes
    through page-locked memory.

    Args:
        numbers: an array or tensor on the CPU, or a list (int64 then).
        device: where they are needed.
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
    """A number that a device will have computed, on its way to the host.

    Args:
        number: [] integer on any device.
    """

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
        """The number; None as long as it is not there."""
        if self._number.is_meta or (self._arrival is not None and not self._arrival.query()):
            return None
        return int(self._number)
