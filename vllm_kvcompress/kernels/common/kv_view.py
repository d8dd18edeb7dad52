"""Keys and values of layers at an event, as operators take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, mismatch
from vllm_kvcompress.kernels.common.tiles import finite, head_slices, valid_entries

NUM_TEMPORARIES = 4  # of [heads, n, D] in fp32 that an operator is taken to hold at once


class KVView(ABC):
    """Keys and values of H heads, lazily gathered and cached.

        |<-- lengths[h] entries of full blocks, at most n -->|<-- tails[h] of a partial one -->|

    H = KV heads, n = capacity, t = num_tail, D = head size. Entries behind a head's length may be
    anything, NaN included.

    Attributes:
        lengths: [H] int64 entries of full blocks.
        num_tail: t, the longest tail.
        shorter: [H] int64 tails, where they differ; None: all are t.
    """

    lengths: Tensor
    num_tail: int
    shorter: Tensor | None = None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Entries per head that there is room for, n."""

    @property
    @abstractmethod
    def head_size(self) -> int:
        """Elements of a key, D."""

    @abstractmethod
    def gather(self, which: int, tail: bool) -> Tensor:
        """[H, n or t, D] keys (0) or values (1), of the full blocks or of the tail."""

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        device: torch.device = self.lengths.device
        return device

    @property
    def num_heads(self) -> int:
        """Number of KV heads, H."""
        return int(self.lengths.shape[0])

    @cached_property
    def tails(self) -> Tensor:
        """[H] int64 entries of the partial block."""
        if self.shorter is not None:
            return self.shorter
        return torch.full_like(self.lengths, self.num_tail)

    @cached_property
    def valid(self) -> Tensor:
        """[H, n] bool: entries below each head's length."""
        return valid_entries(self.lengths, self.capacity)

    def keys(self) -> Tensor:
        """[H, n, D] cached (rotated) keys."""
        return self._gathered(0)

    def values(self) -> Tensor:
        """[H, n, D] cached values."""
        return self._gathered(1)

    def tail_keys(self) -> Tensor:
        """[H, t, D] keys of the partial last block, zeros behind shorter ones."""
        return self._gathered(0, tail=True)

    def tail_values(self) -> Tensor:
        """[H, t, D] values of the partial last block, zeros behind shorter ones."""
        return self._gathered(1, tail=True)

    def clean(self, which: int, heads: slice) -> Tensor:
        """[heads, n, D] keys (0) or values (1) of some heads, zeros behind the lengths."""
        rows = self._gathered(which)[heads]
        return rows if self._unpadded else finite(rows, self.valid[heads])

    def gathered(self, which: int) -> Tensor | None:
        """[H, n, D] keys (0) or values (1) if an operator has asked for them, else None."""
        rows: Tensor | None = vars(self).get(f"_gathered {which} False")
        return rows

    def projected_norms(self, compute: Callable[[KVView], Tensor]) -> Tensor:
        """[H, n] fp32 norms of values after the output projection, L2, mean over the group.

        Args:
            compute: returns them for a view: `value_norms_l2` with the layer's roots. A
                view may ask for some of its pages only, and remember the others from earlier.
        """
        return compute(self)

    @cached_property
    def _unpadded(self) -> bool:
        """Whether all heads are known to be as long as the longest; False on a GPU, which would
        have to be waited for."""
        return self.device.type == "cpu" and bool(self.valid.all())

    def head_slices(self) -> list[slice]:
        """Heads gone through at once by operators with temporaries of [heads, n, D] in fp32."""
        head_bytes = 4 * NUM_TEMPORARIES * self.head_size * self.capacity
        return head_slices(self.num_heads, head_bytes, self.device)

    def _gathered(self, which: int, tail: bool = False) -> Tensor:
        name = f"_gathered {which} {tail}"
        if name not in vars(self):
            rows = self.gather(which, tail)
            if tail and self.shorter is not None:
                rows = finite(rows, valid_entries(self.shorter, self.num_tail))
            vars(self)[name] = rows
        cached: Tensor = vars(self)[name]
        return cached


@dataclass(frozen=True, eq=False)
class PagedKV(KVView):
    """Keys and values in pages that kernels read; gathered rows are zeros behind the lengths.

    Attributes:
        lengths, num_tail, shorter: as in `KVView`.
        entries: full blocks, and the tail right behind those of its head.
        num_columns: of the page table, that full blocks may lie in.
    """

    lengths: Tensor
    num_tail: int
    entries: PagedEntries
    num_columns: int
    shorter: Tensor | None = None

    @classmethod
    def of(cls, entries: PagedEntries, num_tail: int = 0) -> PagedKV:
        """Takes the last `num_tail` entries of every head as its tail."""
        body = (entries.flat_lengths - num_tail).clamp_min(0).to(torch.int64)
        return cls(body, num_tail, entries, int(entries.page_table.shape[1]))

    @cached_property
    def body(self) -> PagedEntries:
        """Entries of full blocks, without the tail."""
        of, table = self.entries, self.entries.page_table[:, : self.num_columns]
        return PagedEntries(of.pages, table, self.lengths, of.block_size, of.head_size)

    @property
    def capacity(self) -> int:
        return self.num_columns * self.entries.block_size

    @property
    def head_size(self) -> int:
        return self.entries.head_size

    def gather(self, which: int, tail: bool) -> Tensor:
        if not tail:
            return self.body.values() if which else self.body.keys()
        places = self.lengths[:, None] + torch.arange(self.num_tail, device=self.device)
        return self.entries.rows_at(places.clamp_max(self.entries.capacity - 1))[:, :, which]

    def clean(self, which: int, heads: slice) -> Tensor:
        return self._gathered(which)[heads]


def paged(view: KVView) -> PagedKV:
    """Returns the view for a kernel that reads pages; refuses one that has none."""
    if not isinstance(view, PagedKV):
        remedy = "call the operator, which picks by what there is, and not its launcher"
        raise mismatch("keys and values in pages", type(view).__name__, remedy)
    return view
