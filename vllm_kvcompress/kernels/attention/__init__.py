"""Attention over pages, with a bias for each entry and the log-sum-exp, in plain torch.

S = sequences (one KV head of one request each), G = query heads of each, D = head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import AddressedEntries, PagedEntries, numbers_at
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers, PagedNumbers
from vllm_kvcompress.kernels.dispatch import by_device, twin
from vllm_kvcompress.rounding import ceil_div

MASK_BYTES = 1 << 26  # of one call


@by_device("attention.decode_triton")
def sum_tiles(lengths: Tensor, tile_ends: Tensor, tile: int) -> None:
    """Writes the number of tiles up to each sequence's end: the work that decoding divides.

        lengths     40  0  17      in tiles of 16:  3  0  2
        tile_ends    3  3   5

    Args:
        lengths: [num_layers, S] int32 or int64 resident tokens; rows may be parts of longer ones.
        tile_ends: [num_layers, S] int32 to write to; rows may be parts of longer ones.
        tile: tokens of a tile, from `tile_size`.
    """
    torch.cumsum(ceil_div(lengths, tile), 1, dtype=torch.int32, out=tile_ends)


@by_device("attention.decode_triton")
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
        bias: of S sequences, added to the logits of their first entries; None: none.
        with_lse: whether to return the log-sum-exp.
        out: [S, G, D] to write to; None: a new tensor.
        tile_ends: [S] int32 result of `sum_tiles` for the lengths, which only kernels read; None:
            they count by themselves.

    Returns:
        [S, G, D] in the queries' type, 0 for an empty sequence; and [S, G] fp32 natural
        log-sum-exp of the logits, minus infinity for an empty sequence (None unless asked for).
    """
    as_chunk = None if out is None else out[:, :, None]
    attend = twin(prefill_attention)
    outputs, lse = attend(entries, queries[:, :, None], scale, bias, with_lse, as_chunk)
    return outputs[:, :, 0], None if lse is None else lse[:, :, 0]


@by_device("attention.decode_triton")
def decode_rows(
    entries: AddressedEntries,
    queries: Tensor,
    scale: float,
    out: Tensor,
    bias: AddressedNumbers | None = None,
    with_lse: bool = False,
) -> Tensor | None:
    """Attention of one query per query head of each request; copies queries that have a target.

    Args:
        entries: lengths may be 0.
        queries: [R, H * G, D] in the pages' type.
        scale, bias, with_lse: as in `decode_attention`.
        out: [R, H * G, D] to write to; 0 where a length is 0.

    Returns:
        [R * H, G] log-sum-exp as there (None unless asked for).
    """
    by_sequence = queries.unflatten(1, (entries.num_heads, -1)).flatten(0, 1)
    paged_bias = None if bias is None else bias.paged()
    attend = twin(decode_attention)
    outputs, lse = attend(entries.paged(), by_sequence, scale, paged_bias, with_lse)
    out.copy_(outputs.view(out.shape))
    if (targets := entries.query_targets) is not None:
        layer_bytes = int(targets.layer_bytes[entries.layer])
        addresses = targets.addresses.flatten().tolist()
        for query, address in zip(queries.flatten(0, 1), addresses, strict=True):
            if address:
                numbers_at(address + layer_bytes, len(query), query.dtype).copy_(query)
    return lse


@by_device("attention.prefill_triton")
def prefill_attention(
    entries: PagedEntries,
    queries: Tensor,
    scale: float,
    bias: PagedNumbers | None = None,
    with_lse: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the queries of the last m entries, causal among these.

    Args:
        entries: the last m are those of the queries.
        queries: [S, G, m, D] in the pages' type.
        scale, bias, with_lse, out: as in `decode_attention`; `out` is [S, G, m, D].

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
        bias: [S, n] fp32 added to the logits of each entry; None: none.

    Returns:
        [S, G, m, D] in the queries' type, and [S, G, m] fp32 natural log-sum-exp.
    """
    num_sequences, group, num_queries, _ = queries.shape
    positions = torch.arange(keys.shape[1], device=keys.device)
    outputs = torch.empty_like(queries)
    lse = queries.new_empty((num_sequences, group, num_queries), dtype=torch.float32)
    tile = max(1, MASK_BYTES // (4 * num_sequences * keys.shape[1]))
    after = torch.arange(num_queries - 1, -1, -1, device=keys.device)
    for start in range(0, num_queries, tile):
        part = slice(start, start + tile)
        hidden = positions >= (lengths[:, None] - after[part])[..., None]
        added = torch.zeros(hidden.shape, device=keys.device) if bias is None else bias[:, None]
        added = added.masked_fill(hidden, -torch.inf)[:, None]
        outputs[:, :, part], lse[:, :, part] = _attend(
            queries[:, :, part], keys, values, added, scale
        )
    return outputs, lse


def give_to_sinks(outputs: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Takes from attention outputs, in place, the share of sinks: logits without a token.

    Args:
        outputs: [S, G, m, D] attention outputs of S sequences, the H heads of one request after
            those of another.
        lse: [S, G, m] fp32 log-sum-exp of the logits of all tokens.
        sinks: [H, G] logits of the sinks.
    """
    shares = torch.sigmoid(lse.unflatten(0, (-1, len(sinks))) - sinks[..., None])
    outputs.mul_(shares.flatten(0, 1)[..., None])


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, added: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends with [S, 1, m, n] fp32 `added` to the logits."""
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
    logits = scale * queries.float() @ keys[:, None].float().transpose(2, 3) + added
    lse = logits.logsumexp(dim=-1)
    return (logits.softmax(dim=-1) @ values[:, None].float()).to(queries.dtype), lse
