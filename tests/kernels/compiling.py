"""Compiles what a launcher would launch on an H100 or H200, without having one."""

from __future__ import annotations

import os
import pkgutil
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """One kernel.

    Attributes:
        name: of the kernel.
        shared_bytes: shared memory of a program.
        ptx: the assembly.
    """

    name: str
    shared_bytes: int
    ptx: str


def compile_launch(launcher: str, *args: Any, **kwargs: Any) -> list[Compiled]:
    """The kernels that `launcher(*args, **kwargs)` would run, each with these very arguments."""
    found = []
    launch = pkgutil.resolve_name(launcher)  # imported while Triton compiles
    run = JITFunction.run

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        kernel = run(self, *given, grid=grid, warmup=True, **named)
        found.append(Compiled(self.__name__, kernel.metadata.shared, kernel.asm["ptx"]))

    triton.runtime.driver.set_active(NoDevice())
    os.environ["TRITON_INTERPRET"] = "1"  # lets tensors on the CPU pass
    JITFunction.run = compile_only
    try:
        launch(*args, **kwargs)
    finally:
        JITFunction.run = run
        os.environ["TRITON_INTERPRET"] = "0"
    return found
