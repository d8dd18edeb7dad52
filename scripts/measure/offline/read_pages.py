"""Which tokens decode steps would read of a text that is at hand as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from offline.dense import BLOCK_SIZE
from vllm_kvcompress.kernels.page_choice import (
    Choice,
    PageLists,
    choose_pages,
    key_bounds,
    key_means,
    rounded_outwards,
)
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.read_rule import ReadRule


def read_mask(queries: Tensor, keys: Tensor, rule: ReadRule, held: Tensor) -> Tensor:
    """[H, m, n] bool: the tokens that each of the last m ones reads, as if it were decoded.

    Args:
        queries: [H * G, m, D] of the last m tokens, rotated.
        keys: [H, n, D] of all tokens, rotated.
        rule: how much of their pages heads read.
        held: [H, n] bool: tokens that were not evicted, whose pages follow each other; the last m
            are held.
    """
    if held.all():
        return _read_of_all(queries, keys, rule)
    mask = held[:, None].repeat(1, queries.shape[1], 1)
    for head, its_queries in enumerate(queries.view(len(keys), -1, *queries.shape[1:])):
        places = held[head].nonzero()[:, 0]
        mask[head, :, places] = _read_of_all(its_queries, keys[head, places][None], rule)[0]
    return mask


def _read_of_all(queries: Tensor, keys: Tensor, rule: ReadRule) -> Tensor:
    """`read_mask` of heads that hold all of these keys."""
    (num_heads, num_tokens, size), count = keys.shape, queries.shape[1]
    width = ceil_div(num_tokens, BLOCK_SIZE)
    missing = width * BLOCK_SIZE - num_tokens
    # What is not there yet lies in a token's last page, which it reads, or behind that.
    padded = torch.nn.functional.pad(keys, (0, 0, 0, missing))
    pages = padded.reshape(num_heads * width, BLOCK_SIZE, size)
    lengths = torch.arange(num_tokens - count, num_tokens, device=keys.device) + 1
    num_read = torch.tensor([rule.read_pages(n, BLOCK_SIZE) for n in lengths.tolist()])
    table = torch.arange(num_heads * width, dtype=torch.int32, device=keys.device)
    rows = table.view(num_heads, 1, width).expand(-1, count, -1).reshape(-1, width)
    asked = queries.view(num_heads, -1, count, size).transpose(1, 2).flatten(0, 1)
    first, last = rule.num_first(BLOCK_SIZE), rule.num_last(BLOCK_SIZE)
    choice = Choice(int(num_read.max()), first, last, rule.num_means)
    counts = ceil_div(lengths, BLOCK_SIZE).repeat(num_heads)
    read = num_read.to(keys.device).repeat(num_heads)
    lists = PageLists(rows, counts, read)
    summaries = key_means(pages, rule.parts) if rule.num_means else key_bounds(pages)
    scales = None
    if rule.bounds == "int8":
        summaries, scales = rounded_outwards(summaries)
    chosen = choose_pages(asked, summaries, lists, choice, scales)
    columns = torch.where(
        torch.arange(choice.most, device=keys.device) < read[:, None], chosen % width, width
    )
    mask = torch.zeros(len(rows), width + 1, dtype=torch.bool, device=keys.device)
    mask.scatter_(1, columns.to(torch.int64), True)
    by_token = mask[:, :width].repeat_interleave(BLOCK_SIZE, dim=1)[:, :num_tokens]
    positions = torch.arange(num_tokens, device=keys.device)
    return by_token.view(num_heads, count, -1) & (positions < lengths[:, None])


def recall(queries: Tensor, keys: Tensor, mask: Tensor, number: int, scale: float) -> Tensor:
    """[H * G, m] each: of the tokens with the highest products the part that is read, and how much
    of the attention weights lies on what is read; [2, H * G, m].

    Args:
        queries, keys: as `read_mask` takes them.
        mask: as it gives it.
        number: of tokens with the highest products.
        scale: of the logits.
    """
    group, (_, count, num_tokens) = queries.shape[0] // len(keys), mask.shape
    logits = scale * queries @ keys.repeat_interleave(group, dim=0).transpose(1, 2)
    ends = torch.arange(num_tokens - count, num_tokens, device=keys.device)[:, None]
    logits = logits.masked_fill(torch.arange(num_tokens, device=keys.device) > ends, -torch.inf)
    read = mask.repeat_interleave(group, dim=0)
    best = logits.topk(number, dim=2).indices
    hits = read.gather(2, best).float().mean(2)
    return torch.stack((hits, (logits.softmax(2) * read).sum(2)))
