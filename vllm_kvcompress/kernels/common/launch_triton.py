"""What launches of all Triton kernels share."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vllm_kvcompress.kernels.common.addressed_rows import AddressedNumbers
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers

FEWEST_ROWS = 16  # of any factor of a tl.dot
MOST_ROWS = 128  # of queries that a program has
# Tensors that may be parts of larger ones, and begin anywhere in these.
PARTS = (
    *("page_table", "lengths", "tile_ends", "targets", "starts"),
    *("bias_table", "bias_starts", "bias_lengths", "num_pages", "num_read"),
)


def padded(size: int, least: int = FEWEST_ROWS) -> int:
    """The next power of two, which is what tiles are made of; masks hide the rest."""
    return max(least, int(triton.next_power_of_2(size)))


def kernel(*changing: str) -> Any:
    """`triton.jit` for kernels that are compiled once, whatever requests there are.

    Triton compiles a kernel anew for numbers that are 1 or multiples of 16 and for tensors that do
    not begin at a multiple of 16 bytes. A request would wait for that.

    Args:
        changing: names of numbers that change from step to step.
    """
    return triton.jit(do_not_specialize=changing, do_not_specialize_on_alignment=PARTS)


def query_rows(number: int, most: int = MOST_ROWS) -> int:
    """Rows of a program for so many queries: of two sizes, for which a kernel is compiled."""
    return FEWEST_ROWS if number <= FEWEST_ROWS else most


@contextmanager
def on_device(holder: PagedEntries | Tensor) -> Iterator[None]:
    """Launches go to the device that holds the pages or the tensor, whatever the current one.

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


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel's programs can start before the kernel in front of it has ended.

    Programmatic dependent launch, of compute capability 9.0 on. Such a kernel waits by itself
    (`gdc_wait`) before it reads what the other one wrote.
    """
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap_options(device: torch.device) -> dict[str, int]:
    """Options of launches of kernels that overlap where a device can."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(device) else {"OVERLAPS": False}


class NumbersArguments(NamedTuple):
    """What a launch passes of numbers in pages.

    Attributes:
        tensors: pages, page table or addresses, starts and lengths.
        table_stride: of the page table; of addresses the layer.
        heads: sequences that share a row of it.
        page: numbers of a page; 0 where there are none.
        addressed: whether addresses say where page ids are.
    """

    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    table_stride: int
    heads: int
    page: int
    addressed: bool = False

    @classmethod
    def of(cls, numbers: PagedNumbers | AddressedNumbers | None) -> NumbersArguments:
        """Of numbers, if a launch has some."""
        if numbers is None:
            return cls((None,) * 4, 0, 1, 0)
        page, runs = numbers.pages.shape[1], (numbers.starts, numbers.lengths)
        if isinstance(numbers, AddressedNumbers):
            tensors = (numbers.pages, numbers.addresses, *runs)
            return cls(tensors, numbers.layer, numbers.num_heads, page, True)
        tensors = (numbers.pages, numbers.page_table, *runs)
        return cls(tensors, numbers.page_table.stride(0), numbers.sequences_per_row, page)
