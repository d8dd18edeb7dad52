"""Which columns of the observation window's logits need a causal mask."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import valid_entries

HIDDEN = -1e30  # a logit of no weight; unlike -inf it gives no NaN where everything is hidden


@dataclass(frozen=True)
class WindowColumns:
    """Where the last w - 1 visible entries are: only these need a causal mask.

    They are appended to the keys as columns of their own, and hidden at their usual places, so
    that the mask is [w, w - 1] and not [w, n].

    Attributes:
        places: [H, w - 1] index into entries and tail together.
        bias: [H, n + t + w - 1] added to logits: hides padding and the places above.
        hidden: [H, w, w - 1] bool: not yet there when the query was asked.
        seeing: [H, w] fp32, 0 for a query that sees nothing.
        num_entries: n.
    """

    places: Tensor
    bias: Tensor
    hidden: Tensor
    seeing: Tensor
    num_entries: int

    @classmethod
    def of(
        cls,
        view: KVView,
        num_queries: int,
        entry_bias: Tensor | None = None,
    ) -> WindowColumns:
        """For a layer, and a bias [H, n] of its entries, if they have one."""
        device, lengths = view.device, view.lengths
        num_entries, num_tail = view.capacity, view.num_tail
        total = (lengths + view.tails)[:, None]
        nth = total - torch.arange(num_queries - 1, 0, -1, device=device)
        exists = nth >= 0
        places = torch.where(nth < lengths[:, None], nth, nth - lengths[:, None] + num_entries)
        places = places.clamp_min(0)
        bias = torch.zeros(lengths.numel(), num_entries + num_tail + num_queries - 1, device=device)
        if entry_bias is not None:
            bias[:, :num_entries] = entry_bias
            bias[:, num_entries + num_tail :] = bias.gather(1, places)
        bias[:, :num_entries].masked_fill_(~view.valid, HIDDEN)
        if view.shorter is not None:
            tail = bias[:, num_entries : num_entries + num_tail]
            tail.masked_fill_(~valid_entries(view.shorter, num_tail), HIDDEN)
        # Entries that do not exist all share place 0, which is then one of the window's own.
        bias.scatter_(1, places, HIDDEN)
        query = torch.arange(num_queries, device=device)
        after = torch.arange(num_queries - 1, device=device) >= query[:, None]
        hidden = after | ~exists[:, None]
        seeing = (total - (num_queries - 1 - query) > 0).float()
        return cls(places, bias, hidden, seeing, num_entries)

    def seen(self, heads: slice, entries: Tensor, tail: Tensor) -> Tensor:
        """[heads, n + t + w - 1, D] fp32: entries, the tail's, and the window's once more."""
        rows = torch.cat([entries, tail], dim=1)
        window = self.places[heads, :, None].expand(-1, -1, rows.shape[2])
        return torch.cat([rows, rows.gather(1, window)], dim=1).float()

    def logits(
        self, heads: slice, rows: slice, queries: Tensor, keys: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """[heads, rows * G, n + t + w - 1]: what a query does not see has no weight.

        Args:
            heads, rows: which, of these and of the queries.
            queries: [heads, rows, G, D] fp32.
            keys: as of `seen`.
            scale: softmax scale.
            out: any numbers, at least as many as are returned.
        """
        num_own, group = self.places.shape[1], queries.shape[2]
        queries = queries.flatten(1, 2)
        shape = (*queries.shape[:2], keys.shape[1])
        out = out[: math.prod(shape)].view(shape)
        torch.baddbmm(self.bias[heads, None], queries, keys.mT, alpha=scale, out=out)
        window = out.unflatten(1, (-1, group))[..., shape[2] - num_own :]
        window.masked_fill_(self.hidden[heads, rows, None], HIDDEN)
        return out

    def fold(self, heads: slice, sums: Tensor) -> Tensor:
        """[heads, n + t + w - 1] column sums -> [heads, n], the window's at their places."""
        num_own = self.places.shape[1]
        whole = sums[:, : sums.shape[1] - num_own]
        whole = whole.scatter_add(1, self.places[heads], sums[:, sums.shape[1] - num_own :])
        return whole[:, : self.num_entries]
