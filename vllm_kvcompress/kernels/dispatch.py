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
    """The launcher `name` of `vllm_kvcompress.kernels.<module>`."""
    return _imported(module, name)


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"vllm_kvcompress.kernels.{module}"), name)


def by_device(twin: Kernel[H, P, T], module: str, on_cpus: str | None = None) -> Kernel[H, P, T]:
    """`twin`, or what has its name and signature elsewhere, by the device of the first argument.

    Of a layer's keys and values kernels read pages alone.

    Args:
        twin: in torch; for any device that has no kernel of its own.
        module: has the launcher for GPUs.
        on_cpus: has one for CPUs; None: the twin serves there.
    """

    @functools.wraps(twin)
    def call(holder: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        chosen: Kernel[H, P, T] = twin
        gathered = isinstance(holder, KVView) and holder.pages is None
        if takes_triton(holder.device) and not gathered:
            chosen = triton_kernel(module, twin.__name__)
        elif on_cpus is not None and holder.device.type == "cpu":
            chosen = _imported(on_cpus, twin.__name__)
        return chosen(holder, *args, **kwargs)

    return call
