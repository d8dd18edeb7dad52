"""--kv-read: what choosing pages costs in a decode step, against what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_parts import shapes
from gpu_parts.measure import host_seconds_of, progress, seconds_of
from vllm_kvcompress.kernels.attention import decode_attention
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.page_choice import Choice, PageLists, choose_pages, key_means

Row = dict[str, Any]
NUM_MEANS = 2  # as of --kv-read quest:0.25,score=mean


@dataclass(frozen=True)
class ReadPlan:
    """Sizes of the measurement of `--kv-read`.

    Attributes:
        contexts: tokens of every head.
        batches: numbers of requests.
        part: of the pages that is read.
        block_size: tokens of a page.
        repeats: of every measurement.
    """

    contexts: tuple[int, ...] = (8192, 32768)
    batches: tuple[int, ...] = (1, 8, 64)
    part: float = 0.25
    block_size: int = 16
    repeats: int = 50


def means_of(entries: PagedEntries) -> Tensor:
    """[pages, NUM_MEANS * head_size] of every page's keys."""
    rows = entries.pages.unflatten(1, (entries.block_size, 2, entries.head_size))
    return key_means(rows[:, :, 0], NUM_MEANS)


def chosen(
    entries: PagedEntries, means: Tensor, queries: Tensor, num_read: int
) -> tuple[Tensor, Tensor]:
    """Pages [S, num_read] that equally long sequences read, and how many tokens these are."""
    num_pages = torch.full_like(entries.flat_lengths, entries.page_table.shape[1])
    wanted = torch.full_like(num_pages, num_read)
    pages = PageLists(entries.page_table, num_pages, wanted)
    chosen_pages = choose_pages(queries, means, pages, Choice(num_read, num_means=NUM_MEANS))
    return chosen_pages, wanted * entries.block_size


def measure_reading(plan: ReadPlan) -> list[Row]:
    """One row per batch and context."""
    cases = [(batch, context) for batch in plan.batches for context in plan.contexts]
    return [_row(plan, *case) for case in progress(cases, "reading a part")]


def _row(plan: ReadPlan, batch: int, context: int) -> Row:
    """Seconds of one layer, with this package's attention over a part and over everything."""
    entries = shapes.make_entries(shapes.uniform_lengths(batch, context), plan.block_size)
    means = means_of(entries)
    shape = (entries.num_sequences, shapes.GROUP, shapes.HEAD_SIZE)
    queries = torch.randn(shape, dtype=shapes.DTYPE, device="cuda")
    num_read = int(plan.part * context) // plan.block_size

    def choose() -> tuple[Tensor, Tensor]:
        return chosen(entries, means, queries, num_read)

    part = PagedEntries(entries.pages, *choose(), entries.block_size, entries.head_size)
    return {
        "batch": batch,
        "context": context,
        "part": plan.part,
        "choice_seconds": seconds_of(choose, plan.repeats),
        "choice_host_seconds": host_seconds_of(choose),
        "part_seconds": seconds_of(
            lambda: decode_attention(part, queries, shapes.SCALE), plan.repeats
        ),
        "whole_seconds": seconds_of(
            lambda: decode_attention(entries, queries, shapes.SCALE), plan.repeats
        ),
    }
