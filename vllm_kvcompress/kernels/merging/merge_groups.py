"""Groups of neighbours, merged, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

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

    Off the CPU the order of additions, and with it the last bits, may differ from run to run.

    Args:
        view: of a layer.
        link: [H, n] bool: an entry joins the one before it.
        key_weights, value_weights: [H, n] fp32, not negative.
        rerotated: by how many positions keys are re-rotated before they are merged ([H, n]
            int64), and how; None: they are not.
        sum_values: the mean of values times the entries of the group.

    Returns:
        [H, n, D] keys and values in the cache's type: an entry that is a group by itself as it
        is, to the bit; zeros where another entry stands for this one, and behind the lengths.
    """
    nth = torch.arange(view.capacity, device=view.device).expand_as(link)
    place = torch.where(link, 0, nth).cummax(dim=1).values
    size = torch.zeros_like(key_weights).scatter_add(1, place, view.valid.float())
    single = (size == 1)[..., None]
    merged = torch.empty_like(view.keys()), torch.empty_like(view.values())
    for heads in view.head_slices():
        for which, weights in enumerate((key_weights, value_weights)):
            rows = view.clean(which, heads)
            wide = rows.float()
            if rerotated is not None and which == 0:
                wide = rerotated[0].rerotate(wide, rerotated[1][heads])
            weights = weights[heads].masked_fill(~view.valid[heads], 0)
            means = _means(wide, weights, place[heads])
            if sum_values and which == 1:
                means *= size[heads, :, None]
            merged[which][heads] = torch.where(single[heads], rows, means.to(rows.dtype))
    return merged


def _means(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
    """[H, n, D] fp32 weighted means of the rows that have a place in common, at that place."""
    weighted = (weights[..., None] * rows).flatten(0, 1)
    # Rows of several heads as rows of one: adding whole rows is much faster than scattering.
    first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
    sums = torch.zeros_like(weighted).index_add_(0, (place + first).flatten(), weighted)
    total = torch.zeros_like(weights).scatter_add(1, place, weights).clamp_min(1e-30)
    return sums.view_as(rows) / total[..., None]
