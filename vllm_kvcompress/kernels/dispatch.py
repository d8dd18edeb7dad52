"""Picks between kernels and their torch twins by device.

The first call that needs Triton or numba imports it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from vllm_kvcompress.kernels.common.kv_view import KVView, PagedKV


class OnDevice(Protocol):
    """A tensor, or a carrier of tensors."""

    @property
    def device(self) -> torch.device: ...


H = TypeVar("H", bound=OnDevice)
P = ParamSpec("P")
T = TypeVar("T")
Kernel = Callable[Concatenate[H, P], T]


def takes_triton(device: torch.device) -> bool:
    """Whether Triton kernels serve tensors on the device."""
    return bool(device.type == "cuda")


def reads_sizes(device: torch.device) -> bool:
    """Whether a size may be read from a tensor: a GPU would have to be waited for."""
    return bool(device.type == "cpu")


def triton_kernel(module: str, name: str) -> Any:
    """Imports and returns the launcher `name` of `vllm_kvcompress.kernels.<module>`."""
    return getattr(importlib.import_module(f"vllm_kvcompress.kernels.{module}"), name)


def by_device(
    triton_module: str, numba_module: str | None = None
) -> Callable[[Kernel[H, P, T]], Kernel[H, P, T]]:
    """Decorates a torch operator: calls are dispatched by the device of the first argument.

    The launchers have the operator's name and signature. They read keys and values from pages
    alone, so a view without pages goes to the torch operator.

    Args:
        triton_module: module of `vllm_kvcompress.kernels` with the launcher for GPUs.
        numba_module: module with the launcher for CPUs; None: the torch operator serves there.
    """

    def decorate(operator: Kernel[H, P, T]) -> Kernel[H, P, T]:
        @functools.wraps(operator)
        def call(holder: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
            chosen: Kernel[H, P, T] = operator
            gathered = isinstance(holder, KVView) and not isinstance(holder, PagedKV)
            if takes_triton(holder.device) and not gathered:
                chosen = triton_kernel(triton_module, operator.__name__)
            elif numba_module is not None and holder.device.type == "cpu":
                chosen = triton_kernel(numba_module, operator.__name__)
            return chosen(holder, *args, **kwargs)

        return call

    return decorate


def twin(operator: Kernel[H, P, T]) -> Kernel[H, P, T]:
    """Returns the torch implementation that `by_device` decorated."""
    original: Kernel[H, P, T] = operator.__wrapped__  # type: ignore[attr-defined]
    return original
