"""Launches of every kernel, at the largest shapes that each is compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.cases import make_entries, random, some_bias
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import (
    AddressedEntries,
    PagedEntries,
    QueryTargets,
)
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers, PagedNumbers
from vllm_kvcompress.kernels.merging.moments import packed_size
from vllm_kvcompress.kernels.page_choice import Choice, PageLists, rounded_outwards
from vllm_kvcompress.kernels.tail_pages import TailRows

KERNELS = "vllm_kvcompress.kernels."
GROUP = 4  # query heads of a KV head
# Launches whose programs have more than some KB of shared memory.
HOLDING_TILES = {
    *(
        "decode_attention",
        "decode_rows",
        "decode_rows bias",
        "prefill_attention",
        "window_mass",
    ),
    *("value_norms_l1", "value_norms_l2", "nearest_keys"),
    *("correct_with_moments", "correct_with_moments by address"),
}


@dataclass(frozen=True)
class Launch:
    """One call.

    Attributes:
        launcher: dotted name.
        num_kernels: that it launches.
        args: for it.
        variant: of several that it is launched in.
    """

    launcher: str
    num_kernels: int
    args: tuple[Any, ...]
    variant: str = ""

    @property
    def name(self) -> str:
        """Name of the launcher without its module, and the variant."""
        return f"{self.launcher.rpartition('.')[2]} {self.variant}".strip()


def addressed_rows(entries: PagedEntries, group: int) -> AddressedEntries:
    """Two sequences as the heads of one request, whose queries go somewhere."""
    addresses, offsets = torch.zeros(2, 4, dtype=torch.int64).split(1)
    sizes = (entries.block_size, entries.head_size)
    runs = entries.lengths, entries.lengths.clone()
    targets = QueryTargets(torch.zeros(1, 2 * group, dtype=torch.int64), offsets[0])
    return AddressedEntries(entries.pages, addresses, *runs, offsets[0], 0, 2, *sizes, targets)


def addressed_numbers(numbers: PagedNumbers) -> AddressedNumbers:
    """Those of two sequences as the heads of one request."""
    addresses = torch.zeros(1, 2, dtype=torch.int64)
    return AddressedNumbers(numbers.pages, addresses, numbers.starts, numbers.lengths, 0, 2)


def launches(
    head_size: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    num_queries: int = 300,
) -> Iterator[Launch]:
    """Launches of every kernel over pages.

    Args:
        head_size: of keys and values.
        block_size: tokens of a page; smaller than a tile, a tile's page ids are read, too.
        dtype: of pages, queries and weights.
        num_queries: of a chunk, as many as take the larger of two sizes of programs.
    """

    def launch(launcher: str, num_kernels: int, *args: Any, variant: str = "") -> Launch:
        return Launch(KERNELS + launcher, num_kernels, args, variant)

    entries = make_entries([70, 3], block_size, head_size, dtype)
    view, tailed = PagedKV.of(entries), PagedKV.of(entries, num_tail=2)
    bias, weights, kept = some_bias([70, 3]), random(2, entries.capacity), entries.valid()
    queries = random(2, GROUP, num_queries, head_size, dtype=dtype)
    yield launch(
        "attention.decode_triton.decode_attention", 3, entries, queries[:, :, 0], 0.1, bias
    )
    rows, together = addressed_rows(entries, GROUP), random(1, 2 * GROUP, head_size, dtype=dtype)
    attend = "attention.decode_triton.decode_rows"
    yield launch(attend, 2, rows, together, 0.1, together.clone())
    added = addressed_numbers(bias)
    yield launch(attend, 2, rows, together, 0.1, together.clone(), added, variant="bias")
    yield launch("attention.prefill_triton.prefill_attention", 1, entries, queries, 0.1, bias)

    window = random(64, 2 * GROUP, head_size, dtype=dtype)
    yield launch("window_mass_triton.window_mass", 2, tailed, window, 0.1, weights)
    output_weight = random(2, head_size, GROUP, 256, dtype=dtype)
    yield launch("value_norms_triton.value_norms_l1", 1, view, output_weight, kept)
    root = random(2, GROUP, head_size, head_size, dtype=dtype)
    yield launch("value_norms_triton.value_norms_l2", 1, view, root)

    state = torch.zeros(2, packed_size(head_size))
    states, lse = PagedNumbers.of_rows(state), random(2, GROUP, num_queries)
    arguments = (states, queries.clone(), lse, queries, 0.1)
    correct = "merging.moments_triton.correct_with_moments"
    yield launch(correct, 1, *arguments)
    arguments = tuple(each[:, :, :1].contiguous() for each in arguments[1:4])
    states = addressed_numbers(states)
    yield launch(correct, 1, states, *arguments, 0.1, variant="by address")
    numbers, indices = torch.tensor([1, 0]), torch.arange(block_size)
    yield launch("compaction_triton.compact_pages", 1, entries, numbers, indices, torch.tensor([0]))
    yield launch("merging.nearest_keys_triton.nearest_keys", 2, view, kept)


def launches_without_pages() -> Iterator[Launch]:
    """Launches of the kernels that choose what is kept."""
    scores, numbers = random(40, 5008), torch.ones(40, dtype=torch.int64)
    yield Launch(KERNELS + "top_entries_triton.top_entries", 5, (scores, scores > 0, numbers))
    floors = numbers[None]
    shares = (floors.float(), numbers[:1] * 9, floors, 9 * floors)
    queries, bounds, few = random(4, GROUP, 128), random(9, 256), numbers[:4]
    table = torch.zeros(4, 5, dtype=torch.int32)
    pages = PageLists(table, few, few)
    chooses = KERNELS + "page_choice_triton.choose_pages"
    yield Launch(chooses, 2, (queries, bounds, pages, Choice(5)))
    codes, scales = rounded_outwards(bounds)
    yield Launch(chooses, 2, (queries, codes, pages, Choice(5), scales))
    by_means = (queries, random(9, 512), pages, Choice(5, num_means=4))
    yield Launch(chooses, 2, by_means)
    yield Launch(KERNELS + "apportion_triton.apportion", 1, shares)
    runs, numbers = torch.zeros(36, 5, 8, 64, dtype=torch.int32), torch.zeros(4, 2).long()
    counts = torch.zeros(36, 4, 8, dtype=torch.int32)
    tails = TailRows(runs, numbers, counts, torch.zeros(36 * 8).long(), 36 * 8)
    added = torch.zeros(5, 3, dtype=torch.int64)
    append = KERNELS + "tail_pages_triton.append_pages"
    yield Launch(append, 1, (tails, added, table, runs[:, :4].contiguous()))
