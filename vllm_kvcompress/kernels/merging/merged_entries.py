"""Entries merged into kept ones, in plain torch.

Off the CPU the order of additions, and with it the last bits, may differ from run to run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.rotary import Rotary


def merge_groups(
    view: KVView,
    link: Tensor,
    key_weights: Tensor,
    value_weights: Tensor,
    rerotated: tuple[Rotary, Tensor] | None = None,
    sum_values: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weighted means of groups of neighbours, at the place of each group's first entry.

    Args:
        link: [H, n] bool: an entry joins the one before it.
        key_weights, value_weights: [H, n] fp32, not negative.
        rerotated: frequencies, and the [H, n] int64 positions that keys are moved by before they
            are merged; None: they are not moved.
        sum_values: multiply the mean of values by the number of entries of the group.

    Returns:
        [H, n, D] keys and values in the cache's type: bit for bit for a group of one entry, zeros
        for the other entries of a group, and behind the lengths.
    """
    entries = torch.arange(view.capacity, device=view.device).expand_as(link)
    place = torch.where(link, 0, entries).cummax(dim=1).values
    size = torch.zeros_like(key_weights).scatter_add(1, place, view.valid.float())
    single = (size == 1)[..., None]
    merged = torch.empty_like(view.keys()), torch.empty_like(view.values())
    for heads in view.head_slices():
        for which, weights in enumerate((key_weights, value_weights)):
            rows = view.clean(which, heads)
            rows32 = rows.float()
            if rerotated is not None and which == 0:
                rows32 = rerotated[0].rerotate(rows32, rerotated[1][heads])
            weights = weights[heads].masked_fill(~view.valid[heads], 0)
            means = _group_means(rows32, weights, place[heads])
            if sum_values and which == 1:
                means *= size[heads, :, None]
            merged[which][heads] = torch.where(single[heads], rows, means.to(rows.dtype))
    return merged


def _group_means(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
    """[H, n, D] fp32 weighted means of the rows that share a place, at that place."""
    weighted = (weights[..., None] * rows).flatten(0, 1)
    # The heads' rows in one tensor, since adding rows is much faster than scattering elements.
    first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
    sums = torch.zeros_like(weighted).index_add_(0, (place + first).flatten(), weighted)
    total = torch.zeros_like(weights).scatter_add(1, place, weights).clamp_min(1e-30)
    return sums.view_as(rows) / total[..., None]


def merge_into(view: KVView, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means of each entry, with weight 1, and the entries merged into it (D2O).

    Args:
        targets: [H, n] int64 entry that each one is merged into.
        weights: [H, n] fp32, not negative; 0 for entries that are not merged, and behind the
            lengths.

    Returns:
        [H, n, D] keys and values in the cache's type.
    """
    merged = torch.empty_like(view.keys()), torch.empty_like(view.values())
    for heads in view.head_slices():
        for which, rows in enumerate(merged):
            rows[heads] = _means_with_targets(
                view.clean(which, heads), targets[heads], weights[heads]
            )
    return merged


def _means_with_targets(rows: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    rows32 = rows.float()
    total = 1 + torch.zeros_like(weights).scatter_add(1, targets, weights)
    index = targets[..., None].expand_as(rows32)
    sums = rows32.scatter_add(1, index, weights[..., None] * rows32)
    return (sums / total[..., None]).to(rows.dtype)


def spread_values(
    view: KVView, kept: Tensor, shares: Tensor, num_targets: int, most: float
) -> Tensor:
    """[H, n, D] values, where kept ones receive shares of evicted ones before them (CaM).

    Args:
        kept: [H, n] bool.
        shares: [H, n] part of a value that each of the next `num_targets` kept ones gets; 0 for
            kept entries, and behind the lengths.
        num_targets: kept entries that receive a share; fewer where fewer follow.
        most: largest sum of shares that a kept entry takes; a larger sum is scaled down to it.
    """
    return torch.cat(
        [
            _spread(view.clean(1, heads), kept[heads], shares[heads], num_targets, most)
            for heads in view.head_slices()
        ]
    )


def _spread(values: Tensor, kept: Tensor, shares: Tensor, num_targets: int, most: float) -> Tensor:
    num_heads, num_entries, dims = values.shape
    # One more column holds the shares themselves.
    sums = _running_sums(shares[..., None].double() * functional.pad(values, (0, 1), value=1))
    # An entry receives from those behind the kept one that lies `num_targets` kept ones before it.
    number = kept.cumsum(dim=1) - 1
    entries = torch.arange(num_entries, device=values.device).expand_as(number)
    places = torch.zeros((num_heads, num_entries + 1), dtype=torch.int64, device=values.device)
    places.scatter_(1, torch.where(kept, number, num_entries), entries)
    behind = places.gather(1, (number - num_targets).clamp_min(0))
    behind = behind.masked_fill(number < num_targets, 0)[..., None].expand(-1, -1, dims + 1)
    received = (sums[:, :-1] - sums.gather(1, behind)).masked_fill_(~kept[..., None], 0)
    received, weight = received.split([dims, 1], dim=2)
    received = received * (most / weight.clamp_min(1e-30)).clamp_max(1)
    return (values + received).to(values.dtype)


def _running_sums(rows: Tensor) -> Tensor:
    """[H, n + 1, D] sums of [H, n, D] rows: at place i the sum of the first i rows."""
    num_heads, num_entries, dims = rows.shape
    sums = rows.new_zeros((num_heads, num_entries + 1, dims))
    if rows.device.type == "cpu":
        torch.cumsum(rows, dim=1, out=sums[:, 1:])
    else:
        # GPUs add up along the last dimension in parallel, along others one by one.
        sums[:, 1:] = rows.mT.cumsum(dim=2).mT
    return sums
