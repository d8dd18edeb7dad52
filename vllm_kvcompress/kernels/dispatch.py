"""Picks between a kernel in Triton, its twin in torch, and its shapes, by device.

Tensors on torch's meta device have no numbers; for them only results' shapes are made, and the
most memory that is taken meanwhile.

Triton is imported by the first call that needs it, so that nothing else depends on it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch


class OnDevice(Protocol):
    """A tensor, or what holds some."""

    @property
    def device(self) -> torch.device: ...


H = TypeVar("H", bound=OnDevice)
P = ParamSpec("P")
T = TypeVar("T")
Kernel = Callable[Concatenate[H, P], T]


def implementation(device: torch.device) -> str:
    """Which one is taken there: `triton`, `shapes` or `torch`."""
    return {"cuda": "triton", "meta": "shapes"}.get(device.type, "torch")


def triton_kernel(module: str, name: str) -> Any:
    """The launcher `name` of `vllm_kvcompress.kernels.<module>`."""
    return getattr(importlib.import_module(f"vllm_kvcompress.kernels.{module}"), name)


def by_device(twin: Kernel[H, P, T], shapes: ModuleType, module: str) -> Kernel[H, P, T]:
    """`twin`, or what has its name and signature elsewhere, by the device of the first argument.

    Args:
        twin: in torch; for any device that has no kernel of its own.
        shapes: has the functions for the meta device; without one, the twin serves there too.
        module: has the launcher for GPUs.
    """
    shapes_alone: Kernel[H, P, T] = getattr(shapes, twin.__name__, twin)

    @functools.wraps(twin)
    def call(holder: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        kind = implementation(holder.device)
        chosen: Kernel[H, P, T] = shapes_alone if kind == "shapes" else twin
        if kind == "triton":
            chosen = triton_kernel(module, twin.__name__)
        return chosen(holder, *args, **kwargs)

    return call
