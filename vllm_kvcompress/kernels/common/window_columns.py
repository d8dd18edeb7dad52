"""What the last queries of a prompt see: a column of logits for every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.transfers import upload

HIDDEN = -1e30  # a logit of no weight; unlike -inf it gives no NaN where everything is hidden


@dataclass(frozen=True)
class WindowColumns:
    """The tokens of a head in their order, the latest in the last column.

        the longest head:   | 0  1  2  3 .............. total - 1 |
        another one:        |  hidden  | 0  1  2 ...... total - 1 |

    So the window's own columns are the last ones in all heads. Only these need a causal mask, the
    same for all, and queries do not compute what lies behind those they run with.

    Attributes:
        num_columns: C, of the longest head, and no less than w - 1.
        places: [H, C] index into entries and tail together; None: columns are these as they lie.
        bias: [H, C] added to logits, hides what is no token; None: nothing is added.
        seeing: [H, w] fp32, 0 for a query that sees nothing.
        behind: positions from each query to the last one.
        later: [w, behind[0]] added to the window's own columns, hides what a query may not see.
        num_entries: n.
    """

    num_columns: int
    places: Tensor | None
    bias: Tensor | None
    seeing: Tensor
    behind: Sequence[int]
    later: Tensor
    num_entries: int

    @classmethod
    def of(
        cls,
        view: KVView,
        behind: Sequence[int],
        entry_bias: Tensor | None = None,
    ) -> WindowColumns:
        """For a layer.

        Args:
            view: the layer.
            behind: as above; from the oldest query to the last, which is 0 behind itself.
            entry_bias: [H, n] of the entries, if they have one.
        """
        device, lengths, num_entries = view.device, view.lengths[:, None], view.capacity
        total = lengths + view.tails[:, None]
        num_columns = max(num_entries + view.num_tail, behind[0])
        away = upload(list(behind), device)
        seeing = (total > away).float()
        later = upload(_later(tuple(behind)), device)
        places, bias = None, None
        if entry_bias is not None:
            bias = functional.pad(entry_bias, (0, view.num_tail))
        # Only the CPU can look without waiting for what runs on the device.
        if device.type != "cpu" or bool((total < num_columns).any()):
            nth = total + torch.arange(-num_columns, 0, device=device)
            places = torch.where(nth < lengths, nth, nth - lengths + num_entries).clamp_min_(0)
            bias = (
                torch.zeros_like(nth, dtype=torch.float32)
                if bias is None
                else bias.gather(1, places)
            )
            bias = bias.masked_fill_(nth < 0, HIDDEN)
        return cls(num_columns, places, bias, seeing, behind, later, num_entries)

    def seen(self, heads: slice, entries: Tensor, tail: Tensor) -> Tensor:
        """[heads, C, D] fp32 rows of the columns, from those of entries and of the tail."""
        rows = torch.cat([entries, tail], dim=1) if tail.shape[1] else entries
        if self.places is not None:
            rows = rows.gather(1, self.places[heads, :, None].expand(-1, -1, rows.shape[2]))
        return rows.float()

    def logits(
        self, heads: slice, rows: slice, queries: Tensor, keys: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """[heads, rows * G, at most C]: columns up to the last query's; hidden ones have no weight.

        Args:
            heads, rows: which, of these and of the queries.
            queries: [heads, w * G, D] fp32.
            keys: as of `seen`.
            scale: softmax scale.
            out: any numbers, at least as many as are returned.
        """
        first, last = self.behind[rows.start], self.behind[rows.stop - 1]
        group = queries.shape[1] // len(self.behind)
        mine = queries[:, rows.start * group : rows.stop * group]
        keys = keys[:, : self.num_columns - last]
        shape = (*mine.shape[:2], keys.shape[1])
        out = out[: math.prod(shape)].view(shape)
        if self.bias is None:
            torch.baddbmm(out, mine, keys.mT, beta=0, alpha=scale, out=out)
        else:
            bias = self.bias[heads, None, : shape[2]]
            torch.baddbmm(bias, mine, keys.mT, alpha=scale, out=out)
        own = slice(self.behind[0] - first, self.behind[0] - last)
        seen = out.unflatten(1, (-1, group))[..., shape[2] - first + last :]
        seen += self.later[rows, None, own]
        return out

    def fold(self, heads: slice, sums: Tensor) -> Tensor:
        """[heads, any, C] of columns -> [heads, any, n] of entries, 0 where there is no column."""
        if self.places is not None:
            places = self.places[heads, None].expand_as(sums)
            sums = sums.new_zeros(sums.shape).scatter_add_(2, places, sums)
        return sums[..., : self.num_entries]


@lru_cache(maxsize=2)  # the same in all layers
def _later(behind: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As of `WindowColumns`."""
    hidden = np.arange(behind[0], 0, -1) <= np.array(behind)[:, None]
    added: np.ndarray[Any, np.dtype[np.float32]] = hidden * np.float32(HIDDEN)
    return added


def by_head(queries: Tensor, num_heads: int) -> Tensor:
    """[w, H * G, D] -> [H, w * G, D] fp32."""
    return queries.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(1, 2).float()
