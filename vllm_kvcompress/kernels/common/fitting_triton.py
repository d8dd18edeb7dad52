"""Programs with as many rows as the device has shared memory for.

How much shared memory a program takes depends on the compiler: the same tiles take twice as much
on compute capability 10.0 as on 8.6. So nothing is computed beforehand. Triton refuses to launch a
program that the device has no room for, and one with half as many rows is compiled. That happens
while kernels are warmed up; requests find what fits.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
from torch import Tensor

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.kernels.common.launch_triton import FEWEST_ROWS

fitting_rows: dict[tuple[object, ...], int] = {}  # where these are not the ones asked for


def launch_fitting(name: str, rows: int, like: Tensor, launch: Callable[[int], object]) -> None:
    """Calls `launch` with `rows`, or with half as many until they fit.

    Args:
        name: of the kernel.
        rows: of a program where they fit, a power of two: entries, queries, or what else the grid
            is made of.
        like: has the device, the type and a row size that the kernel is compiled for.
        launch: launches the kernel, its programs having so many rows.

    Raises:
        UnsupportedError: not even the fewest rows that a matrix product takes fit.
    """
    kind = (name, rows, like.device, like.dtype, like.shape[-1])
    number = fitting_rows.get(kind, rows)
    while True:
        try:
            launch(number)
            return
        except triton.OutOfResources as error:
            if number <= FEWEST_ROWS:
                raise UnsupportedError(
                    f"expected a GPU whose programs may take {error.required} of {error.name}, "
                    f"which {name} needs in {like.dtype}, got one with {error.limit}; "
                    "serve in bf16, with another policy, or on another GPU."
                ) from error
            number //= 2
            fitting_rows[kind] = number
