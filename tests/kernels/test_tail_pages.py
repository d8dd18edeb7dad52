"""Pages of new blocks behind the kept pages of every head, against plain loops."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import tail_cases as cases
from tests.kernels.backends import Backend, Device
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError

APPENDED = "tests.kernels.tail_cases.appended"


def check(runs: torch.Tensor, table: torch.Tensor) -> None:
    """Each added page where it belongs, and nothing anywhere else."""
    rows, blocks = cases.make_rows(), cases.block_table().tolist()
    counts, numbers = rows.counts.tolist(), rows.run_numbers.tolist()
    for request, slot, between, row, logical in cases.ADDED:
        for layer in range(cases.LAYERS):
            for head in range(cases.HEADS):
                offset = int(rows.offsets[layer * cases.HEADS + head])
                page = blocks[row][logical] * cases.PER_BLOCK + offset
                column = counts[layer][slot][head] + between
                run = runs[layer, numbers[slot][column // cases.RUN], head]
                assert run[column % cases.RUN] == page
                run[column % cases.RUN] = 0
                if table.numel():
                    assert table[layer, request, head, column] == page
                    table[layer, request, head, column] = 0
    assert not runs.any()
    assert not table.any()


@pytest.mark.parametrize("width", [0, 16])
def test_the_twin_appends_behind_what_heads_keep(width: int) -> None:
    check(*cases.appended("tail_pages", "cpu", width))


@pytest.mark.parametrize("width", [0, 16])
def test_one_launch_appends_the_same(backend: Backend, width: int) -> None:
    device = "cuda" if isinstance(backend, Device) else "cpu"
    check(*backend.call(APPENDED, "tail_pages_triton", device, width))


def test_parts_of_rows_are_refused(interpreter: Child) -> None:
    rows, launch = cases.make_rows(), "vllm_kvcompress.kernels.tail_pages_triton"
    added = torch.tensor(cases.ADDED).T
    with pytest.raises(InvariantError, match="side by side"):
        interpreter.call(f"{launch}.append_pages", rows, added, cases.block_table())
