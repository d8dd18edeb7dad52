"""Launching of Triton kernels: compilation, devices, arguments, and programs that fit."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers, PagedNumbers

MIN_DOT_ROWS = 16  # of any factor of a tl.dot
MAX_QUERY_ROWS = 128  # of a program
# Tensors that may be parts of larger ones, and begin anywhere in these.
PARTS = (
    *("page_table", "lengths", "tile_ends", "targets", "starts"),
    *("bias_table", "bias_starts", "bias_lengths", "num_pages", "num_read"),
)
fitting_rows: dict[tuple[object, ...], int] = {}  # of kernels whose programs had to be smaller


def padded(size: int) -> int:
    """The next power of two, which is what tiles are made of; masks hide the rest."""
    return max(MIN_DOT_ROWS, int(triton.next_power_of_2(size)))


def kernel(*changing: str) -> Any:
    """`triton.jit` for kernels that are compiled once, whatever requests there are.

    Triton compiles a kernel anew for numbers that are 1 or multiples of 16 and for tensors that do
    not begin at a multiple of 16 bytes. A request would wait for that.

    Args:
        changing: names of numbers that change from step to step.
    """
    return triton.jit(do_not_specialize=changing, do_not_specialize_on_alignment=PARTS)


def query_rows(number: int, most: int = MAX_QUERY_ROWS) -> int:
    """Rows of a program for `number` queries: one of two sizes that a kernel is compiled for."""
    return MIN_DOT_ROWS if number <= MIN_DOT_ROWS else most


@contextmanager
def on_device(holder: PagedEntries | Tensor) -> Iterator[None]:
    """Launches on the device that holds the pages or the tensor, whatever the current one.

    Raises:
        InvariantError: they are on no GPU and Triton does not interpret.
    """
    device = holder.device
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
        return
    expect(
        os.environ.get("TRITON_INTERPRET") == "1",
        "pages or tensors on a CUDA device",
        f"some on {device}",
        "call the operator, which picks by device, and not its launcher",
    )
    yield


def launch_fitting(name: str, rows: int, like: Tensor, launch: Callable[[int], object]) -> None:
    """Launches programs of `rows` rows, or of half as many until they fit in shared memory, on the
    device of `like`.

    How much a program takes depends on the compiler: the same tiles take twice as much on compute
    capability 10.0 as on 8.6. So Triton is asked: it refuses to launch what does not fit. That
    happens while kernels are warmed up, and requests use the size that fitted.

    Args:
        name: of the kernel.
        rows: a power of two: entries, queries, or what else the grid is made of.
        like: has the type and a row size that the kernel is compiled for.
        launch: launches the kernel with programs of the given number of rows.

    Raises:
        UnsupportedError: not even the fewest rows that a matrix product takes fit.
    """
    kind = (name, rows, like.device, like.dtype, like.shape[-1])
    number = fitting_rows.get(kind, rows)
    while True:
        try:
            with on_device(like):
                launch(number)
            return
        except triton.OutOfResources as error:
            if number <= MIN_DOT_ROWS:
                raise UnsupportedError(
                    f"expected a GPU whose programs may take {error.required} of {error.name}, "
                    f"which {name} needs in {like.dtype}, got one with {error.limit}; "
                    "serve in bf16, with another policy, or on another GPU."
                ) from error
            number //= 2
            fitting_rows[kind] = number


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel's programs can start before the kernel in front of it has ended.

    Programmatic dependent launch, from compute capability 9.0 on. Such a kernel waits by itself
    (`gdc_wait`) before it reads what the other one wrote.
    """
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap_options(device: torch.device) -> dict[str, int]:
    """Options of launches of kernels that overlap where a device can."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(device) else {"OVERLAPS": False}


def entries_arguments(
    entries: PagedEntries,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], dict[str, int]]:
    """Arguments of a launch for keys and values in pages: tensors, strides and constants."""
    tensors = (entries.pages, entries.page_table, entries.flat_lengths)
    strides = (entries.pages.stride(0), entries.page_table.stride(0))
    sizes = {"BLOCK_SIZE": entries.block_size, "HEAD_SIZE": entries.head_size}
    return tensors, strides, {**sizes, "DIMS": padded(entries.head_size)}


class NumbersArguments(NamedTuple):
    """Arguments of a launch that describe numbers in pages.

    Attributes:
        tensors: pages, page table or addresses, starts and lengths.
        table_stride: of the page table; for addresses, the layer.
        heads: sequences that share a row of it.
        page: numbers of a page; 0 where there are no numbers.
        addressed: whether addresses say where page ids are.
    """

    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    table_stride: int
    heads: int
    page: int
    addressed: bool = False

    @classmethod
    def of(cls, numbers: PagedNumbers | AddressedNumbers | None) -> NumbersArguments:
        """Takes them from numbers; None gives a page size of 0."""
        if numbers is None:
            return cls((None,) * 4, 0, 1, 0)
        page, runs = numbers.pages.shape[1], (numbers.starts, numbers.lengths)
        if isinstance(numbers, AddressedNumbers):
            tensors = (numbers.pages, numbers.addresses, *runs)
            return cls(tensors, numbers.layer, numbers.num_heads, page, True)
        tensors = (numbers.pages, numbers.page_table, *runs)
        return cls(tensors, numbers.page_table.stride(0), numbers.sequences_per_row, page)
