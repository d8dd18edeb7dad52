"""Every kernel compiles in bf16, for the GPUs that vLLM serves on, and fits there. Needs no GPU.

The interpreter accepts what the compiler refuses: a loop variable that changes its type, shapes
that are no powers of two. Triton is the one that vLLM's CUDA build brings (requirements).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.cases import make_entries, random, some_bias
from tests.kernels.child import Child, at_once
from tests.kernels.compiled_cases import (
    GROUP,
    HOLDING_TILES,
    addressed_numbers,
    addressed_rows,
    launches,
    launches_without_pages,
)
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.merging.moments import packed_size
from vllm_kvcompress.kernels.page_choice import Choice, PageLists

KERNELS = "vllm_kvcompress.kernels."
DECODE = "attention.decode_triton.decode_attention"
BF16 = torch.bfloat16
ROOT = Path(__file__).parents[2]
COMPILE = "tests.kernels.compiling.compile_launch"
A100_SHARED_BYTES = 166_912  # that a program may have on compute capability 8.0


def check(compiler: Child, launcher: str, num_kernels: int, *args: Any, **kwargs: Any) -> Any:
    """Kernels by name, for an H100; they fit, and there are as many as expected."""
    compiled = compiler.call(COMPILE, 90, KERNELS + launcher, *args, **kwargs)
    assert len(compiled) == num_kernels
    assert all(kernel.fits for kernel in compiled)
    return {kernel.name: kernel for kernel in compiled}


# What 8.6 compiles to, 8.0 and 8.9 do, too: `scripts/checks/compile_kernels.py` shows it.
@pytest.mark.parametrize("capability", [86, 90, 100, 120])
def test_programs_too_large_for_a_gpu_are_compiled_smaller(
    compilers: list[Child], capability: int
) -> None:
    """Every kernel that holds tiles in shared memory, at the largest head size."""
    large = [launch for launch in launches(256) if launch.name in HOLDING_TILES]
    calls = [(COMPILE, capability, launch.launcher, *launch.args) for launch in large]
    refused = []
    for launch, kernels in zip(large, at_once(compilers, calls), strict=True):
        assert sum(kernel.fits for kernel in kernels) == launch.num_kernels, launch.name
        refused += [kernel.shared_bytes for kernel in kernels if not kernel.fits]
    assert {launch.name for launch in large} == HOLDING_TILES
    if capability == 90:
        assert not refused
    if capability == 86:
        assert refused
        assert max(refused) <= A100_SHARED_BYTES


@pytest.mark.parametrize(("head_size", "block_size"), [(128, 16), (80, 128), (256, 64)])
def test_decode(compiler: Child, head_size: int, block_size: int) -> None:
    entries = make_entries([40, 3], block_size, head_size, BF16)
    queries = random(2, 4, head_size, dtype=BF16)
    kernels = check(
        compiler,
        DECODE,
        3,
        entries,
        queries,
        0.1,
        some_bias([8, 3]),
    )
    check_pieces(kernels["_pieces_kernel"])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head_size", [128, 80])
def test_decode_by_address(compiler: Child, head_size: int, biased: bool) -> None:
    """Reading addresses in the kernel leaves the loads of rows as they are."""
    rows = addressed_rows(make_entries([40, 3], 16, head_size, BF16), GROUP)
    queries = random(1, 8, head_size, dtype=BF16)
    launcher = "attention.decode_triton.decode_rows"
    bias = addressed_numbers(some_bias([8, 3])) if biased else None
    kernels = check(compiler, launcher, 2, rows, queries, 0.1, queries, bias)
    check_pieces(kernels["_pieces_kernel"])


@pytest.mark.parametrize("capability", [86, 90, 100, 120])
def test_decode_waits_for_few_loads_and_overlaps_launches(compiler: Child, capability: int) -> None:
    """How many tiles there are, what a sequence is, page ids, and rows: these wait for one another.

    More than 128 sequences are found in two loads. A reduction starts early where it can, and reads
    nothing of the pieces before it has waited for these, nor writes anything.
    """
    rows = addressed_rows(make_entries([40, 3], 16, 128, BF16), GROUP)
    queries = random(1, 2 * GROUP, 128, dtype=BF16)
    launcher = KERNELS + "attention.decode_triton.decode_rows"
    pieces, reduction = compiler.call(COMPILE, capability, launcher, rows, queries, 0.1, queries)
    assert pieces.dependent_loads("cp.async.cg") == 1 + 4
    assert reduction.dependent_loads("ld.global.v4") == 2
    for kernel, loads_ahead in ((pieces, 0), (reduction, 4)):
        assert kernel.overlaps == (capability >= 90)
        ahead, wait, _ = kernel.ptx.partition("griddepcontrol.wait")
        assert bool(wait) == kernel.overlaps
        if wait:
            assert ahead.count("ld.global") == loads_ahead
            assert "st.global" not in ahead
    assert ("griddepcontrol.launch_dependents" in pieces.ptx) == pieces.overlaps


def test_appending_pages(compiler: Child) -> None:
    """36 layers of 8 heads are 288 of 512 rows of a program."""
    (launch,) = [each for each in launches_without_pages() if each.name == "append_pages"]
    check(compiler, launch.launcher.removeprefix(KERNELS), 1, *launch.args)


def check_pieces(pieces: Any) -> None:
    assert "mma.sync" in pieces.ptx
    # Rows of keys and values travel 16 bytes at a time, page ids one by one.
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (0x\w+)", pieces.ptx)
    assert set(sizes) == {"0x4", "0x10"}
    assert sizes.count("0x10") >= 32
    # Two tiles of keys and values in flight for each program, and room for a second program.
    assert 4 * 2**14 <= pieces.shared_bytes <= 227 * 2**10 // 2


def test_decode_without_bias_and_lse(compiler: Child) -> None:
    entries = make_entries([40, 3], 16, 128, BF16)
    queries = random(2, 4, 128, dtype=BF16)
    check(compiler, DECODE, 2, entries, queries, 0.1, None, False, None, entries.lengths)


@pytest.mark.parametrize(("head_size", "block_size"), [(128, 16), (80, 128)])
def test_compact(compiler: Child, head_size: int, block_size: int) -> None:
    entries = make_entries([block_size, 5], block_size, head_size, BF16)
    arguments = (torch.tensor([1, 0]), torch.arange(block_size), torch.tensor([0]))
    kernels = check(compiler, "compaction_triton.compact_pages", 1, entries, *arguments)
    assert "st.global.v4" in kernels["_compact_kernel"].ptx


def test_scores(compiler: Child) -> None:
    entries = make_entries([70, 3], 16, 128, BF16)
    queries = random(32, 8, 128, dtype=BF16)
    kernels = check(
        compiler,
        "window_mass_triton.window_mass",
        2,
        PagedKV.of(entries, 2),
        queries,
        0.1,
        None,
    )
    assert all("wgmma" in kernel.ptx for kernel in kernels.values())
    weight = random(2, 128, 4, 256, dtype=BF16)
    launcher = "value_norms_triton.value_norms_l1"
    kernels = check(compiler, launcher, 1, PagedKV.of(entries), weight, entries.valid())
    assert "wgmma" in kernels["_l1_kernel"].ptx
    launcher = "value_norms_triton.value_norms_l2"
    root = random(2, 4, 128, 128, dtype=BF16)
    kernels = check(compiler, launcher, 1, PagedKV.of(entries), root)
    assert "wgmma" in kernels["_l2_kernel"].ptx


def test_largest_fp32_tiles_fit(compiler: Child) -> None:
    """The kernels with the largest tiles."""
    view = PagedKV.of(make_entries([70, 3], 16, 128))
    weight = random(2, 128, 4, 256)
    check(compiler, "value_norms_triton.value_norms_l1", 1, view, weight, view.valid)
    check(compiler, "value_norms_triton.value_norms_l2", 1, view, random(2, 4, 128, 128))
    check(compiler, "merging.nearest_keys_triton.nearest_keys", 2, view, view.valid)


@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill(compiler: Child, block_size: int) -> None:
    entries = make_entries([70, 3], block_size, 128, BF16)
    queries = random(2, 4, 40, 128, dtype=BF16)
    launcher = "attention.prefill_triton.prefill_attention"
    kernels = check(compiler, launcher, 1, entries, queries, 0.1, some_bias([9, 9]))
    assert "wgmma" in kernels["_prefill_kernel"].ptx


def test_correction(compiler: Child) -> None:
    state = torch.zeros(2, packed_size(128))
    states = PagedNumbers.of_rows(state)
    for num_queries in (1, 300):
        queries = random(2, 4, num_queries, 128, dtype=BF16)
        arguments = (states, queries, random(2, 4, num_queries), queries, 0.1)
        check(compiler, "merging.moments_triton.correct_with_moments", 1, *arguments)


@pytest.mark.parametrize(("head_size", "block_size"), [(128, 16), (80, 128)])
def test_nearest(compiler: Child, head_size: int, block_size: int) -> None:
    entries = make_entries([70, 3], block_size, head_size, BF16)
    launcher = "merging.nearest_keys_triton.nearest_keys"
    kernels = check(compiler, launcher, 2, PagedKV.of(entries), random(2, entries.capacity) > 1)
    assert "wgmma" in kernels["_nearest_kernel"].ptx


@pytest.mark.parametrize("num_heads", [2, 40])
def test_selection(compiler: Child, num_heads: int) -> None:
    scores = random(num_heads, 5008)
    numbers = torch.ones(num_heads, dtype=torch.int64)
    launcher = "top_entries_triton.top_entries"
    kernels = check(compiler, launcher, 5, scores, scores > 0, numbers)
    # Heads hold whole pages, so that scores are read 16 bytes at a time.
    assert "ld.global.v4" in kernels["_keep_kernel"].ptx
    check(
        compiler,
        "apportion_triton.apportion",
        1,
        numbers[None].float(),
        numbers[:1] * 9,
        numbers[None],
        9 * numbers[None],
    )


@pytest.mark.parametrize(("head_size", "num_means"), [(80, 2), (128, 2), (128, 0)])
def test_choice_of_pages(compiler: Child, head_size: int, num_means: int) -> None:
    queries, vectors = random(2, 4, head_size, dtype=BF16), random(9, 2 * head_size, dtype=BF16)
    table = torch.zeros(2, 16, dtype=torch.int32)
    launcher = "page_choice_triton.choose_pages"
    pages = (queries, vectors, PageLists(table, table[:, 0], table[:, 0]))
    kernels = check(compiler, launcher, 2, *pages, Choice(9, num_means=num_means))
    # A page's summary is read 16 bytes at a time.
    assert "ld.global.v4" in kernels["_scores_kernel"].ptx


def test_triton_is_that_of_vllms_cuda_build() -> None:
    """vllm 0.32.0 needs torch 2.13.0, whose CUDA build needs this one."""
    locked = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    assert "triton==3.7.1" in locked
