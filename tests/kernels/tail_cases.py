"""Rows of kept pages and tails, and what appending to them leaves; launched by name, since what is
written cannot travel by pipe."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from vllm_kvcompress.kernels.tail_pages import TailRows

LAYERS, HEADS, RUN, PER_BLOCK, SLOTS = 3, 2, 4, 11, 5
ADDED = [  # request in the step, slot, pages of its tail before, row in the block table, block
    (0, 3, 0, 1, 6),
    (0, 3, 1, 1, 7),
    (1, 1, 2, 0, 4),
    (2, 0, 5, 2, 9),
]


def make_rows() -> TailRows:
    """Every slot has three runs of its own, in no order."""
    generator = torch.Generator().manual_seed(2)
    numbers = 1 + torch.randperm(3 * SLOTS, generator=generator).view(SLOTS, 3)
    return TailRows(
        runs=torch.zeros(LAYERS, 1 + 3 * SLOTS, HEADS, RUN, dtype=torch.int32),
        run_numbers=numbers,
        counts=torch.randint(7, (LAYERS, SLOTS, HEADS), generator=generator).int(),
        offsets=torch.tensor([0, 1, 4, 5, 8, 9]),
        pages_per_block=PER_BLOCK,
    )


def block_table() -> Tensor:
    """Part of a larger one."""
    return torch.arange(3 * 12, dtype=torch.int32).view(3, 12)[:, :10]


def appended(module: str, device: str, width: int) -> tuple[Tensor, Tensor]:
    """Runs, and a table of `width` columns (0: none is given), after an `append_pages`."""
    rows = make_rows()
    given = (rows.runs, rows.run_numbers, rows.counts, rows.offsets)
    rows = TailRows(*(each.to(device) for each in given), PER_BLOCK)
    table = torch.zeros(LAYERS, 3, HEADS, width, dtype=torch.int32, device=device)
    append = importlib.import_module(f"vllm_kvcompress.kernels.{module}").append_pages
    added = torch.tensor(ADDED).T.contiguous().to(device)
    append(rows, added, block_table().to(device), table if width else None)
    return rows.runs.cpu(), table.cpu()
