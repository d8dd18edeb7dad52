"""Kernels over pages as shapes alone: what they return, and the most memory they take meanwhile.

For pages on torch's meta device, which has shapes and no numbers: so the memory of an event is
known before there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.paged_entries import PagedEntries
from vllm_kvcompress.kernels.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.rotary_torch import Turns

RESIDUALS_SPLIT = 512  # entries whose sum a program of `value_residuals_triton` writes
MOMENT_SPLIT = 512  # entries whose sums a program of `moments_triton` writes
KEYDIFF_BYTES = 1 << 14  # of keys whose sum a program of `keydiff_triton` writes


def prefill_attention(
    entries: PagedEntries,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None = None,
    with_lse: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `paged_torch.prefill_attention`; what a step takes is not measured here."""
    lse = torch.empty(queries.shape[:-1], device=queries.device) if with_lse else None
    return torch.empty_like(queries) if out is None else out, lse


decode_attention = prefill_attention


def correct_with_moments(
    state: PagedNumbers, outputs: Tensor, lse: Tensor, queries: Tensor, scale: float
) -> None:
    """As `paged_torch.correct_with_moments`."""


def compact_pages(
    entries: PagedEntries, page_counts: Tensor, kept_indices: Tensor, targets: Tensor
) -> None:
    """As `paged_torch.compact_pages`."""
    torch.repeat_interleave(page_counts, output_size=targets.numel())


def window_mass(
    entries: PagedEntries,
    num_tail: int,
    queries: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """As `paged_torch.window_mass`."""
    return _per_entry(entries)


def window_perturbation(
    entries: PagedEntries, num_tail: int, queries: Tensor, scale: float, variant: str
) -> Tensor:
    """As `paged_torch.window_perturbation`."""
    num_rows = queries.shape[0] * queries.shape[1] // entries.num_sequences
    splits = perturbation_splits(entries, num_rows)
    pieces = torch.empty(
        entries.num_sequences, num_rows, splits, entries.head_size, device=entries.device
    )
    del pieces
    return _per_entry(entries)


def perturbation_splits(entries: PagedEntries, num_rows: int) -> int:
    """Into how many parts `perturbation_triton` splits entries: to keep a GPU busy, and not more.

    Args:
        entries: S = KV heads.
        num_rows: queries of a head, with their group.
    """
    programs = entries.num_sequences * -(-num_rows // 128)
    return max(1, min(-(-entries.capacity // 1024), 512 // programs))


def keydiff_scores(entries: PagedEntries, anchor: str) -> Tensor:
    """As `paged_torch.keydiff_scores`."""
    row_bytes = 2 * entries.head_size * entries.pages.element_size()
    num_tiles = -(-entries.capacity // max(1, min(128, KEYDIFF_BYTES // row_bytes)))
    sums = torch.empty(entries.num_sequences, num_tiles, entries.head_size, device=entries.device)
    del sums
    return _per_entry(entries)


def value_norms_l1(entries: PagedEntries, output_weight: Tensor, wanted: Tensor) -> Tensor:
    """As `paged_torch.value_norms_l1`."""
    return _per_entry(entries)


def value_norms_l2(entries: PagedEntries, output_gram: Tensor) -> Tensor:
    """As `paged_torch.value_norms_l2`."""
    return _per_entry(entries)


def add_to_moments(entries: PagedEntries, state: Tensor, evicted: Tensor) -> Tensor:
    """As `paged_torch.add_to_moments`."""
    num_splits = -(-entries.capacity // MOMENT_SPLIT)
    dims = entries.head_size
    cross = state.new_empty(entries.num_sequences, num_splits, dims, dims)
    del cross
    return torch.empty_like(state)


def moment_residuals(entries: PagedEntries, state: Tensor, scale: float) -> Tensor:
    """As `paged_torch.moment_residuals`."""
    turn = state.new_empty(entries.num_sequences, entries.head_size, entries.head_size)
    del turn
    return _per_entry(entries)


def nearest_keys(entries: PagedEntries, kept: Tensor) -> tuple[Tensor, Tensor]:
    """As `paged_torch.nearest_keys`."""
    cosines = _per_entry(entries)
    places = torch.empty_like(cosines, dtype=torch.int64)
    valid = entries.valid()
    lists = []
    for flags in (kept & valid, valid & ~kept):
        number = flags.cumsum(dim=1)
        lists.append((torch.where(flags, number - 1, 0).to(torch.int32), number[:, -1]))
    inverse = torch.empty_like(cosines)
    copies = entries.pages.new_empty(entries.num_sequences, entries.capacity, entries.head_size)
    del copies, inverse, lists
    return cosines, places


def neighbour_cosines(entries: PagedEntries) -> Tensor:
    """As `paged_torch.neighbour_cosines`."""
    return _per_entry(entries)


def key_distances(entries: PagedEntries, others: Tensor) -> Tensor:
    """As `paged_torch.key_distances`."""
    return _per_entry(entries)


def value_residuals(entries: PagedEntries, weights: Tensor, order: int, num_pairs: int) -> Tensor:
    """As `paged_torch.value_residuals`."""
    splits = -(-entries.capacity // RESIDUALS_SPLIT)
    sums = torch.empty(entries.num_sequences, splits, entries.head_size, device=entries.device)
    del sums
    return torch.empty((1 + num_pairs, *weights.shape), device=entries.device)


def merge_groups(
    entries: PagedEntries,
    link: Tensor,
    key_weights: Tensor,
    value_weights: Tensor,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """As `paged_torch.merge_groups`."""
    keys = entries.pages.new_empty(entries.num_sequences, entries.capacity, entries.head_size)
    return keys, torch.empty_like(keys)


def merge_into(
    entries: PagedEntries, kept: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As `paged_torch.merge_into`."""
    keys = entries.pages.new_empty(entries.num_sequences, entries.capacity, entries.head_size)
    sums = torch.empty_like(keys, dtype=torch.float32)
    values = torch.empty_like(keys)
    del sums
    return keys, values


def spread_values(entries: PagedEntries, kept: Tensor, shares: Tensor, num_targets: int) -> Tensor:
    """As `paged_torch.spread_values`."""
    numbers = kept.cumsum(dim=1, dtype=torch.int32)
    del numbers
    return entries.pages.new_empty(entries.num_sequences, entries.capacity, entries.head_size)


def _per_entry(entries: PagedEntries) -> Tensor:
    """[S, capacity] fp32."""
    return torch.empty(entries.num_sequences, entries.capacity, device=entries.device)
