"""Every kernel test runs in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.backends import Backend, Device, Interpreted
from tests.kernels.child import Child

# `tl.dot` on bf16 is wrong in the interpreter of Triton 3.9.
INTERPRETED = ["interpreter-float32", "interpreter-float16"]
ON_DEVICE = ["cuda-float32", "cuda-float16", "cuda-bfloat16"]


@pytest.fixture(scope="session")
def compiler() -> Iterator[Child]:
    process = Child(interprets=False)
    yield process
    process.close()


@pytest.fixture(scope="session")
def compilers(compiler: Child) -> Iterator[list[Child]]:
    """Two, for what takes long."""
    another = Child(interprets=False)
    yield [compiler, another]
    another.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """GPUs that are not there make no skipped tests; test_device.py says it once."""
    if "backend" in metafunc.fixturenames:
        names = [*INTERPRETED, *(ON_DEVICE if torch.cuda.is_available() else [])]
        marks = {name: [pytest.mark.gpu] if name in ON_DEVICE else [] for name in names}
        params = [pytest.param(name, marks=marks[name]) for name in names]
        metafunc.parametrize("backend", params, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """Runs Triton launchers on tensors of one type."""
    where, _, name = request.param.partition("-")
    dtype = getattr(torch, name)
    if where == "interpreter":
        return Interpreted(dtype, request.getfixturevalue("interpreter"))
    return Device(dtype)
