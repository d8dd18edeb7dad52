"""From the host to the device, without waiting for what the device is doing."""

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
