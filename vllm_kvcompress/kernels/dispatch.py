"""Picks between kernels and their twins in torch, by device.

Triton and numba are imported by the first call that needs them, so that nothing else depends on
them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from vllm_kvcompress.kernels.common.kv_view import KVView


class OnDevice(Protocol):
    """A tensor, or what holds some."""

    @property
    def device(self) -> torch.device: ...


H = TypeVar("H", bound=OnDevice)
P = ParamSpec("P")
T = TypeVar("T")
Kernel = Callable[Concatenate[H, P], T]


def takes_triton(device: torch.device) -> bool:
    """Whether tensors there are for kernels in Triton."""
    return bool(device.type == "cuda")


def triton_kernel(module: str, name: str) -> Any:
    """Imports and returns the launcher `name` of `vllm_kvcompress.kernels.<module>`."""
    return getattr(importlib.import_module(f"vllm_kvcompress.kernels.{module}"), name)


def by_device(
    triton_module: str, numba_module: str | None = None
) -> Callable[[Kernel[H, P, T]], Kernel[H, P, T]]:
    """Decorates a torch operator: calls are dispatched by the device of the first argument.

    The launchers have the operator's name and signature. Of a layer's keys and values they read
    pages alone, so gathered ones go to the torch operator.

    Args:
        triton_module: module of `vllm_kvcompress.kernels` with the launcher for GPUs.
        numba_module: module with one for CPUs; None: the torch operator serves there.
    """

    def decorate(operator: Kernel[H, P, T]) -> Kernel[H, P, T]:
        @functools.wraps(operator)
        def call(holder: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
            chosen: Kernel[H, P, T] = operator
            gathered = isinstance(holder, KVView) and holder.pages is None
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
