"""Compiles what a launcher would launch on some GPU, without having one."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm_kvcompress.kernels.common import launch_triton
from vllm_kvcompress.kernels.common.launch_triton import fitting_rows

# Shared memory that a program may have, by compute capability ("Maximum amount of shared memory
# per thread block" in the CUDA C++ programming guide).
SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
TENSOR_COLUMNS = 512  # of tensor memory, which 10.0 has


@dataclass(frozen=True)
class Compiled:
    """One kernel, as compiled.

    Attributes:
        name: of the kernel.
        shared_bytes: shared memory of a program.
        fits: whether a program may have that; where not, a smaller one comes next.
        overlaps: whether programs may start before the kernel in front has ended.
        ptx: the assembly.
        cubin: the machine code.
    """

    name: str
    shared_bytes: int
    fits: bool
    overlaps: bool
    ptx: str
    cubin: bytes

    def registers(self) -> tuple[int, int]:
        """Registers of a thread, and the bytes that it spills to memory."""
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            listing = subprocess.run(
                [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
            )
        numbers = re.search(r"REG:(\d+) STACK:(\d+)", listing.stdout)
        assert numbers is not None, listing.stdout
        return int(numbers[1]), int(numbers[2])

    def dependent_loads(self, load: str) -> int:
        """How many loads from global memory wait for one another, up to the first of a kind.

        In the order of the assembly, each of its loops once: a load waits for what its address,
        mask or a branch in front of it is computed from, through shared memory, too. Behind a
        barrier everything waits for what was stored to shared memory before, and behind a wait for
        copies for these. Beyond that, loads wait for nothing.

        Args:
            load: what the instruction begins with.
        """
        depths: dict[str, int] = {}
        control = shared = 0
        groups = [0]  # of copies to shared memory; the last is still open
        for line in self.ptx.splitlines():
            parts = re.match(r"\s*(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s*(.*);", line)
            if parts is None:
                continue
            guard, operation, operands = parts.groups()
            read = [*re.findall(r"%\w+", operands), guard]
            depth = max(control, *(depths.get(name, 0) for name in read))
            if operation.startswith(("ld.global", "cp.async.c")):
                depth += 1
                if operation.startswith(load):
                    return depth
            if operation.startswith("cp.async.commit"):
                groups.append(0)
            elif operation.startswith("cp.async.wait"):
                control = max(control, *groups[: len(groups) - 1 - int(operands)], 0)
            elif operation.startswith("cp.async"):
                groups[-1] = max(groups[-1], depth)
            elif operation.startswith("st.shared"):
                shared = max(shared, depth)
            elif operation.startswith("bar"):
                control = max(control, shared)
            elif operation.startswith("bra"):
                control = depth
            elif not operation.startswith("st."):
                written = operands.partition("}" if operands[:1] == "{" else ",")[0]
                depths |= dict.fromkeys(re.findall(r"%\w+", written), depth)
        raise AssertionError(f"{self.name} has no {load}")


class NoDevice:
    """What Triton asks of a driver before it compiles.

    Args:
        capability: compute capability, 90 for 9.0.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton has its kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def only_compiling(capability: int) -> Iterator[list[Compiled]]:
    """Kernels are compiled instead of launched, or refused as on a GPU; yields them.

    Args:
        capability: of the GPU.
    """
    kernels: list[Compiled] = []
    run, most = JITFunction.run, SHARED_BYTES[capability]

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        kernel = run(self, *given, grid=grid, warmup=True, **named)
        shared, columns = kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", 0) or 0
        fits = shared <= most and columns <= TENSOR_COLUMNS
        ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
        overlaps = kernel.metadata.launch_pdl
        kernels.append(Compiled(self.__name__, shared, fits, overlaps, ptx, cubin))
        if not fits:
            raise triton.OutOfResources(shared, most, "shared memory")

    triton.runtime.driver.set_active(NoDevice(capability))
    fitting_rows.clear()  # of another GPU
    os.environ["TRITON_INTERPRET"] = "1"  # lets tensors on the CPU pass
    JITFunction.run = compile_only
    try:
        with mock.patch.object(launch_triton, "overlaps", return_value=capability >= 90):
            yield kernels
    finally:
        JITFunction.run = run
        os.environ["TRITON_INTERPRET"] = "0"


def compile_launch(capability: int, launcher: str, *args: Any, **kwargs: Any) -> list[Compiled]:
    """The kernels that `launcher(*args, **kwargs)` would run, each with these very arguments."""
    launch = pkgutil.resolve_name(launcher)  # imported while Triton compiles
    with only_compiling(capability) as kernels:
        launch(*args, **kwargs)
    return kernels
