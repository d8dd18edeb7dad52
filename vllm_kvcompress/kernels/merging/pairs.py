"""Disjoint pairs of neighbours, and weights of keys where pairs merge in rounds; plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.dispatch import reads_sizes
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.rounding import ceil_div

PART = 3  # a round takes at most so many-th of the links: the most that can always be had


def disjoint_links(weights: Tensor, able: Tensor, number: Tensor) -> Tensor:
    """The lightest links of which no two share an entry, taken one by one from the lightest on.

    A link joins an entry to the one before it. Of equal links the later one is taken first.

    Args:
        weights: [H, n] fp32 without NaN.
        able: [H, n] bool, links that may be taken.
        number: [H] int64 links to take; a third of those of a run of able links can always be had.

    Returns:
        [H, n] bool.
    """
    weights = weights.masked_fill(~able, torch.inf)
    earlier_first = pad(able[:, :-1] & (weights[:, :-1] < weights[:, 1:]), (1, 0))
    later_first = pad(able[:, 1:] & (weights[:, 1:] <= weights[:, :-1]), (0, 1))
    # Up a slope from its lightest link, every other one is taken; at a peak two slopes meet.
    steps = _run_lengths(earlier_first) | _run_lengths(later_first.flip(1)).flip(1)
    return top_entries(-weights, able & (steps % 2 == 0), number)


def _run_lengths(flags: Tensor) -> Tensor:
    """[H, n] int64 number of set flags in a row that end at each place; flags begin unset."""
    index = torch.arange(flags.shape[1], device=flags.device)
    return index - torch.where(flags, 0, index).cummax(dim=1).values


def max_rounds(num_entries: int) -> int:
    """Rounds after which every head could have a single entry left."""
    return 1 + math.floor(math.log(max(1, num_entries)) / math.log(PART / (PART - 1)))


@dataclass(frozen=True)
class Pairs:
    """P pairs of neighbours that merge in one round; r is a value without the attention's output.

    Attributes:
        shares: [2, P] fp32 shares of the attention.
        norms: [3, P] fp32 norms of r_1, r_2 and r_1 + r_2.
        sizes: [2, P] fp32 sizes of the loss's derivatives, as the rule says or as carried.
    """

    shares: Tensor
    norms: Tensor
    sizes: Tensor


class PairRule(Protocol):
    """How keys of pairs are weighted."""

    @property
    def order(self) -> int:
        """Order of the norms, 1 or 2."""
        ...

    def sizes(self, shares: Tensor, norms: Tensor) -> Tensor:
        """Sizes of the loss's derivatives by keys, from shares of the attention and |r|."""
        ...

    def weigh_pairs(self, pairs: Pairs) -> Tensor:
        """[2, P] weights, not negative; where their sum is 0 or not finite, tokens are taken."""
        ...

    def carry(self, pairs: Pairs, weights: Tensor) -> Tensor:
        """[P] sizes that merged entries carry, from [2, P] weights that add up to 1."""
        ...


def pair_weights(
    view: KVView,
    joined: Tensor,
    shares: Tensor,
    tokens: Tensor,
    former: Tensor | None,
    rule: PairRule,
) -> tuple[Tensor, Tensor | None]:
    """Weights of every key in its group, where pairs merge round by round.

    The value of a merged entry is the mean by tokens; its share of the attention is the sum.

    Args:
        joined: [H, n] int64 round, from 1 on, in which an entry, the first of its group by then,
            joins the one before it; 0: in none.
        shares: [H, n] fp32 shares of the attention; padding may hold anything.
        tokens: [H, n] fp32 tokens that entries stand for.
        former: [H, n] fp32 sizes that entries carry from former events; None: they carry none.
        rule: how a pair is weighted.

    Returns:
        [H, n] fp32 weights, whose sum over a group is 1; and the sizes that groups carry on, at
        their first entries.
    """
    weights = torch.empty_like(shares)
    carried = None if former is None else torch.empty_like(former)
    for heads in view.head_slices():
        values, valid = view.clean(1, heads).float(), view.valid[heads]
        clean = shares[heads].masked_fill(~valid, 0)
        rest = values.new_zeros(clean.numel() + 1, values.shape[2])
        torch.sub(values, clean[:, None] @ values, out=rest[:-1].view_as(values))
        sizes = None
        if former is not None:
            norms = torch.linalg.vector_norm(rest, ord=rule.order, dim=1)
            sizes = rule.sizes(_flat(clean), norms) + _flat(former[heads].masked_fill(~valid, 0))
        groups = _Groups(rest, _flat(clean), _flat(tokens[heads]), sizes)
        weights[heads] = groups.merge(joined[heads], rule)
        if carried is not None and sizes is not None:
            carried[heads] = sizes[:-1].view_as(clean)
    return weights, carried


def _flat(values: Tensor) -> Tensor:
    """A copy of all heads' values in a row, with one place more, for pairs that do not exist."""
    return pad(values.flatten(), (0, 1))


@dataclass(frozen=True)
class _Groups:
    """Groups at the places of their first entries, all heads in a row; merging changes them.

    Attributes:
        rest: [H * n + 1, D] values without the attention's output.
        shares, tokens, carried: [H * n + 1].
    """

    rest: Tensor
    shares: Tensor
    tokens: Tensor
    carried: Tensor | None

    def merge(self, joined: Tensor, rule: PairRule) -> Tensor:
        """Merges the pairs of all rounds; [H, n] weights of every key in its group."""
        num_heads, width = joined.shape
        end, exact = joined.numel(), reads_sizes(joined.device)
        weights = torch.ones(joined.shape, device=joined.device)
        index = torch.arange(width, device=joined.device)
        begin = width * torch.arange(num_heads, device=joined.device)[:, None]
        for number in range(1, 1 + (int(joined.max()) if exact else max_rounds(width))):
            flags = (joined == number).flatten()
            room = int(flags.sum()) if exact else num_heads * ceil_div(width, PART)
            second = torch.nonzero_static(flags, size=room, fill_value=end)[:, 0]
            group = torch.where((joined > 0) & (joined < number), 0, index).cummax(dim=1).values
            group += begin
            first = torch.where(second < end, _flat(group)[second - 1], end)
            factor = weights.new_ones(end + 1)
            factor[first], factor[second] = self._merge_pairs(torch.stack((first, second)), rule)
            weights *= factor[group]
        return weights

    def _merge_pairs(self, places: Tensor, rule: PairRule) -> Tensor:
        """Merges pairs at [2, P] places into the first ones; [2, P] weights that add up to 1."""
        rows, tokens = self.rest[places], self.tokens[places]
        norms = torch.linalg.vector_norm(torch.cat((rows, rows.sum(0, True))), rule.order, dim=2)
        shares = self.shares[places]
        known = self.carried
        sizes = rule.sizes(shares, norms[:2]) if known is None else known[places]
        pairs = Pairs(shares, norms, sizes)
        weight = rule.weigh_pairs(pairs)
        total = weight.sum(dim=0)
        weight = torch.where((total > 0) & torch.isfinite(total), weight, tokens)
        weight, by_tokens = (x / x.sum(dim=0).clamp_min(1e-30) for x in (weight, tokens))
        self.rest[places[0]] = (by_tokens[..., None] * rows).sum(dim=0)
        self.shares[places[0]], self.tokens[places[0]] = shares.sum(dim=0), tokens.sum(dim=0)
        if self.carried is not None:
            self.carried[places[0]] = rule.carry(pairs, weight)
        return weight
