"""Attention with the log-sum-exp as a second output, in plain torch.

S = sequences (one KV head of one request each), G = query heads of each, D = head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.addressed_rows import (
    AddressedNumbers,
    AddressedRows,
    numbers_at,
)
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.rounding import ceil_div

TILE_BYTES = 1 << 26  # of the mask of one call


def sum_tiles(lengths: Tensor, tile_ends: Tensor, tile: int) -> None:
    """Writes how many tiles sequences have up to each one's end: what decode attention divides.

        lengths     40  0  17      in tiles of 16:  3  0  2
        tile_ends    3  3   5

    Args:
        lengths: [num_layers, S] int32 or int64 resident tokens; rows may be parts of longer ones.
        tile_ends: [num_layers, S] int32 to write to; likewise.
        tile: tokens of a tile, as `tile_size` has it.
    """
    torch.cumsum(ceil_div(lengths, tile), 1, dtype=torch.int32, out=tile_ends)


def decode_attention(
    entries: PagedEntries,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None = None,
    with_lse: bool = True,
    out: Tensor | None = None,
    tile_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one query per query head over each sequence's entries.

    Args:
        entries: lengths may be 0.
        queries: [S, G, D] in the pages' type.
        scale: softmax scale.
        bias: of S sequences, added to the logits of their first entries; None: nothing.
        with_lse: whether to return the log-sum-exp.
        out: [S, G, D] to write to; None: a new tensor.
        tile_ends: [S] int32 what `sum_tiles` makes of the lengths, which only kernels read; None:
            they count by themselves.

    Returns:
        [S, G, D] in the queries' type, 0 for an empty sequence; and [S, G] fp32 natural
        log-sum-exp of the logits, minus infinity for an empty sequence (None unless asked for).
    """
    whole_out = None if out is None else out[:, :, None]
    outputs, lse = prefill_attention(entries, queries[:, :, None], scale, bias, with_lse, whole_out)
    return outputs[:, :, 0], None if lse is None else lse[:, :, 0]


def decode_rows(
    rows: AddressedRows,
    queries: Tensor,
    scale: float,
    out: Tensor,
    bias: AddressedNumbers | None = None,
    with_lse: bool = False,
) -> Tensor | None:
    """Attention of one query per query head of each request, over what `rows` address; queries
    that have a target are copied there.

    Args:
        rows: lengths may be 0.
        queries: [R, H * G, D] in the pages' type.
        scale: softmax scale.
        out: [R, H * G, D] to write to; 0 where a length is.
        bias: of the same requests, added to the logits of their first entries; None: nothing.
        with_lse: whether to return the log-sum-exp.

    Returns:
        [R * H, G] fp32 natural log-sum-exp of the logits, minus infinity where a length is 0
        (None unless asked for).
    """
    entries = PagedEntries(
        rows.pages, rows.page_table(), rows.lengths, rows.block_size, rows.head_size
    )
    mine = queries.unflatten(1, (rows.num_heads, -1)).flatten(0, 1)
    added = None if bias is None else bias.paged()
    found, lse = decode_attention(entries, mine, scale, added, with_lse)
    out.copy_(found.view(out.shape))
    if (targets := rows.query_targets) is not None:
        behind = int(targets.layer_bytes[rows.layer])
        addresses = targets.addresses.flatten().tolist()
        for query, address in zip(queries.flatten(0, 1), addresses, strict=True):
            if address:
                numbers_at(address + behind, len(query), query.dtype).copy_(query)
    return lse


def prefill_attention(
    entries: PagedEntries,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None = None,
    with_lse: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the last m entries' queries, causal among these.

    Args:
        entries: of which the last m are the queries' own.
        queries: [S, G, m, D] in the pages' type.
        scale: softmax scale.
        bias: of S sequences, added to the logits of their first entries; None: nothing.
        with_lse: whether to return the log-sum-exp.
        out: [S, G, m, D] to write to; None: a new tensor.

    Returns:
        [S, G, m, D] in the queries' type, and [S, G, m] fp32 natural log-sum-exp (None unless
        asked for); 0 and minus infinity for queries that see nothing.
    """
    lengths = entries.flat_lengths
    added = None if bias is None else bias.gathered(entries.capacity)
    outputs, lse = attention_with_lse(
        queries, entries.keys(), entries.values(), lengths, scale, added
    )
    after = torch.arange(queries.shape[2] - 1, -1, -1, device=entries.device)
    blind = (after >= lengths[:, None])[:, None]
    outputs = outputs.masked_fill(blind[..., None], 0)
    if out is not None:
        outputs = out.copy_(outputs)
    return outputs, lse.masked_fill(blind, -torch.inf) if with_lse else None


def attention_with_lse(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of sequences of different lengths, causal among the last m entries.

    Args:
        queries: [S, G, m, D] of the last m entries of each sequence.
        keys, values: [S, n, D], padded on the right with finite numbers.
        lengths: [S] valid entries, the m last included.
        scale: softmax scale.
        bias: [S, n] fp32 added to the logits of each entry; None: nothing.

    Returns:
        [S, G, m, D] in the queries' type, and [S, G, m] fp32 natural log-sum-exp.
    """
    num_sequences, group, num_queries, _ = queries.shape
    nth = torch.arange(keys.shape[1], device=keys.device)
    outputs = torch.empty_like(queries)
    lse = queries.new_empty((num_sequences, group, num_queries), dtype=torch.float32)
    tile = max(1, TILE_BYTES // (4 * num_sequences * keys.shape[1]))
    after = torch.arange(num_queries - 1, -1, -1, device=keys.device)
    for start in range(0, num_queries, tile):
        part = slice(start, start + tile)
        hidden = nth >= (lengths[:, None] - after[part])[..., None]
        added = torch.zeros(hidden.shape, device=keys.device) if bias is None else bias[:, None]
        added = added.masked_fill(hidden, -torch.inf)[:, None]
        outputs[:, :, part], lse[:, :, part] = _attend(
            queries[:, :, part], keys, values, added, scale
        )
    return outputs, lse


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, added: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One call; `added` [S, 1, m, n] fp32 to the logits."""
    group = queries.shape[1]
    if queries.device.type == "cpu":
        outputs, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries,
            keys[:, None].expand(-1, group, -1, -1),
            values[:, None].expand(-1, group, -1, -1),
            attn_mask=added if queries.dtype == torch.float32 else added.to(queries.dtype),
            scale=scale,
        )
        return outputs, lse
    logits = scale * queries.float() @ keys[:, None].float().transpose(2, 3)
    logits = logits + added
    lse = logits.logsumexp(dim=-1)
    return (logits.softmax(dim=-1) @ values[:, None].float()).to(queries.dtype), lse
