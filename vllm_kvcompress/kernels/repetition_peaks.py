"""The highest attention that a repetition pays to each token of its context, in plain torch.

H = KV heads, G = query heads per KV head, D = head size, n = tokens so far, w = number of the last
tokens, whose queries are given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.tiles import exact_bf16_products, head_slices, tile_bytes


def repetition_peaks(
    keys: Tensor, queries: Tensor, scale: float, num_context: int, sinks: Tensor | None = None
) -> Tensor:
    """Highest attention to each of the first tokens, over queries and a group's query heads.

    A softmax over the keys of all tokens up to the query's own. A few heads at a time, in tiles of
    at most `tile_bytes` (or of one query's group, if that is more).

    Args:
        keys: [H, n, D] keys of all tokens.
        queries: [w, H * G, D] queries of the last tokens, oldest first; at least one.
        scale: softmax scale.
        num_context: m, number of first tokens to score; at most n - w.
        sinks: [H, G] logits that take part in every softmax and are no token; None: none.

    Returns:
        [H, m] fp32 from 0 to 1.
    """
    (num_heads, num_keys, _), num_queries = keys.shape, queries.shape[0]
    grouped = queries.unflatten(1, (num_heads, -1)).permute(1, 0, 2, 3)
    group, device = grouped.shape[2], keys.device
    peaks = torch.zeros(num_heads, num_context, dtype=torch.float32, device=device)
    row_size = group * num_keys
    slices = head_slices(num_heads, 8 * num_queries * row_size + 4 * keys[0].numel(), device)
    at_once = slices[0].stop
    tile = min(num_queries, max(1, tile_bytes(device) // (4 * row_size * at_once)))
    room = torch.empty(2, at_once * tile * row_size, dtype=torch.float32, device=device)
    after = torch.ones(tile, tile, dtype=torch.bool, device=device).triu_(1)
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    for heads in slices:
        head_keys = keys[heads].float()
        for start in range(0, num_queries, tile):
            members = grouped[heads, start : start + tile]
            num_rows = members.shape[1]
            seen = num_keys - num_queries + start + num_rows  # by the last query
            shape = (len(members), num_rows * group, seen)
            logits, weights = (part[: math.prod(shape)].view(shape) for part in room)
            with exact_bf16_products(exact):
                rows, columns = members.flatten(1, 2).float(), head_keys[:, :seen].mT
                torch.baddbmm(logits, rows, columns, beta=0, alpha=scale, out=logits)
            own = logits.unflatten(1, (num_rows, group))[..., seen - num_rows :]
            own.masked_fill_(after[:num_rows, None, :num_rows], float("-inf"))
            torch.softmax(logits, dim=2, out=weights)
            if sinks is not None:
                shares = logits.logsumexp(dim=2) - sinks[heads].repeat(1, num_rows)
                weights.mul_(torch.sigmoid(shares)[..., None])
            highest = weights[:, :, :num_context].amax(dim=1)
            torch.maximum(peaks[heads], highest, out=peaks[heads])
    return peaks
