"""Keys and values of one request's layer at an event, as operators take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.paged_entries import PagedEntries, expect
from vllm_kvcompress.kernels.common.tiles import finite, head_slices, valid_entries

TEMPORARIES = 4  # of [heads, n, D] in fp32 that an operator is taken to hold at once


class KVView(ABC):
    """Gathered when somebody asks for them, and once.

        |<-- lengths[h] entries of full blocks, at most n -->|<-- tails[h] of a partial one -->|

    H = KV heads, n = capacity, t = num_tail, D = head size. What lies behind a head's length may
    be anything, NaN included.

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
        """n."""

    @property
    @abstractmethod
    def head_size(self) -> int:
        """D."""

    @abstractmethod
    def gather(self, which: int, tail: bool) -> Tensor:
        """[H, n or t, D] keys (0) or values (1), of the full blocks or of the tail."""

    @property
    def pages(self) -> PagedEntries | None:
        """Full blocks and the tail behind them, where kernels read pages."""
        return None

    @property
    def device(self) -> torch.device:
        """Where the entries are."""
        device: torch.device = self.lengths.device
        return device

    @property
    def num_heads(self) -> int:
        """H."""
        return int(self.lengths.shape[0])

    @cached_property
    def tails(self) -> Tensor:
        """[H] int64 entries of the partial block."""
        return (
            torch.full_like(self.lengths, self.num_tail) if self.shorter is None else self.shorter
        )

    @cached_property
    def valid(self) -> Tensor:
        """[H, n] bool: entries below each head's length."""
        return valid_entries(self.lengths, self.capacity)

    def keys(self) -> Tensor:
        """[H, n, D] cached (rotated) keys."""
        return self._gathered(0)

    def values(self) -> Tensor:
        """[H, n, D] values."""
        return self._gathered(1)

    def tail_keys(self) -> Tensor:
        """[H, t, D] keys of the partial last block, zeros behind shorter ones."""
        return self._gathered(0, tail=True)

    def tail_values(self) -> Tensor:
        """[H, t, D] values of the partial last block, likewise."""
        return self._gathered(1, tail=True)

    def clean(self, which: int, heads: slice) -> Tensor:
        """[heads, n, D] keys (0) or values (1) of some heads, zeros behind the lengths."""
        rows = self._gathered(which)[heads]
        return rows if self._unpadded else finite(rows, self.valid[heads])

    @cached_property
    def _unpadded(self) -> bool:
        """Whether all heads are as long as the longest, where asking does not wait."""
        return self.device.type == "cpu" and bool(self.valid.all())

    def head_slices(self) -> list[slice]:
        """Heads gone through at once by operators with temporaries of [heads, n, D] in fp32."""
        head_bytes = 4 * TEMPORARIES * self.head_size * self.capacity
        return head_slices(self.num_heads, head_bytes, self.device)

    def _gathered(self, which: int, tail: bool = False) -> Tensor:
        name = f"_gathered {which} {tail}"
        if name not in vars(self):
            found = self.gather(which, tail)
            if tail and self.shorter is not None:
                found = finite(found, valid_entries(self.shorter, self.num_tail))
            vars(self)[name] = found
        rows: Tensor = vars(self)[name]
        return rows


@dataclass(frozen=True, eq=False)
class GatheredKV(KVView):
    """In tensors.

    Attributes:
        lengths: as of `KVView`.
        rows: [H, n, D] keys and values of full blocks, padded on the right.
        tail: [H, t, D] keys and values of the partial last block.
    """

    lengths: Tensor
    rows: tuple[Tensor, Tensor]
    tail: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor | None = None,
        tail: tuple[Tensor, Tensor] | None = None,
    ) -> GatheredKV:
        """Of [H, n, D] keys and values; all entries count, and there is no tail unless given."""
        if lengths is None:
            lengths = torch.full((len(keys),), keys.shape[1], device=keys.device)
        return cls(lengths, (keys, values), tail or (keys[:, :0], values[:, :0]))

    @property
    def num_tail(self) -> int:  # type: ignore[override]
        """t."""
        return int(self.tail[0].shape[1])

    @property
    def capacity(self) -> int:
        """n."""
        return int(self.rows[0].shape[1])

    @property
    def head_size(self) -> int:
        """D."""
        return int(self.rows[0].shape[2])

    def gather(self, which: int, tail: bool) -> Tensor:
        """They are."""
        return self.tail[which] if tail else self.rows[which]


@dataclass(frozen=True, eq=False)
class PagedKV(KVView):
    """In pages that kernels read; gathered rows are zeros behind the lengths.

    Attributes:
        lengths, num_tail, shorter: as of `KVView`.
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
        """The last `num_tail` entries of every head as its tail."""
        body = (entries.flat_lengths - num_tail).clamp_min(0).to(torch.int64)
        return cls(body, num_tail, entries, int(entries.page_table.shape[1]))

    @property
    def pages(self) -> PagedEntries:
        """Full blocks and the tail."""
        return self.entries

    @cached_property
    def body(self) -> PagedEntries:
        """Full blocks alone."""
        of, table = self.entries, self.entries.page_table[:, : self.num_columns]
        return PagedEntries(of.pages, table, self.lengths, of.block_size, of.head_size)

    @property
    def capacity(self) -> int:
        """n."""
        return self.num_columns * self.entries.block_size

    @property
    def head_size(self) -> int:
        """D."""
        return self.entries.head_size

    def gather(self, which: int, tail: bool) -> Tensor:
        """From the pages."""
        if not tail:
            return self.body.values() if which else self.body.keys()
        nth = torch.arange(self.num_tail, device=self.device)
        places = (self.lengths[:, None] + nth).clamp_max(self.entries.capacity - 1)
        return self.entries.rows_at(places)[:, :, which]

    def clean(self, which: int, heads: slice) -> Tensor:
        """As they were gathered."""
        return self._gathered(which)[heads]


def paged(view: KVView) -> PagedKV:
    """The view, for a kernel that reads pages.

    Raises:
        InvariantError: it has none.
    """
    expect(
        isinstance(view, PagedKV),
        "keys and values in pages",
        type(view).__name__,
        "call the operator, which picks by what there is, and not its launcher",
    )
    assert isinstance(view, PagedKV)
    return view
