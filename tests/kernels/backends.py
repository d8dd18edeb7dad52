"""Where a Triton launcher runs: in the interpreter, or on a GPU."""

from __future__ import annotations

import pkgutil
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

import torch

from tests.kernels.child import Child

# Relative and absolute: results of the type, and fp32 results of inputs of the type.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Backend(Protocol):
    """Takes tensors on the CPU and returns tensors on the CPU."""

    dtype: torch.dtype

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the function of that dotted name returns."""
        ...

    def twin(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What the torch twin returns, on the same device."""
        ...


class Interpreted:
    """Backend that runs Triton's interpreter."""

    def __init__(self, dtype: torch.dtype, interpreter: Child) -> None:
        self.dtype = dtype
        self.call = interpreter.call

    def twin(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Device:
    """Backend that runs on the current GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.twin(pkgutil.resolve_name(name), *args, **kwargs)

    def twin(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return moved(function(*moved(args, "cuda"), **moved(kwargs, "cuda")), "cpu")


def moved(value: Any, device: str) -> Any:
    """Tensors inside tuples, dicts and dataclasses, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        items = (moved(item, device) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: moved(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **changes)
    return value


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal up to rounding of inputs of `dtype`; NaN never equals anything."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=False
    )
