"""Pages: the K and V of one (layer, KV head) for `block_size` tokens, as one run of memory.

With the layout BLHNC the whole cache is a flat array of pages:

    page = block * pages_per_block + layer_offset[layer] + head

The order of elements inside a page is up to the attention kernels. On GPUs the key and value of a
token lie side by side (`InterleavedPagePool`). CPU kernels store K before V, each in an order that
a `Packing` describes (`PackedPagePool`). MLA layers store one latent row per token, which is the
key, and whose first elements are the value (`LatentPagePool`). Pools return keys and values in the
model's type, or rows as they are stored.

In a quantized cache (`quantization.py`) rows may depend on scales of their layer. Pages do not say
which layer owns them, so readers pass the layer. Kept tokens are copied as stored, in their layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.page_norms import PageNorms
from vllm_kvcompress.cache.page_order import Packing
from vllm_kvcompress.cache.quantization import Quantization
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.paged_entries import EntriesInPages, PagedEntries
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies.base import PageShape

Integers = np.ndarray[Any, np.dtype[np.int64]]
KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class PagePool(EntriesInPages, ABC):
    """All pages of the cache, and where a cache group's layers lie in a block.

    Attributes:
        stored: which of keys (0) and values (1) have rows of their own in a page.
        pages: [num_pages, len(stored) * block_size * row_size] view of the whole cache.
        pages_per_block: pages of a block, over all layers and heads.
        layer_offsets: [num_layers] int64 first page of each layer inside a block, on the device.
        num_heads: KV heads per layer (of this rank).
        block_size: tokens per page.
        head_size: elements of a key.
        quantization: of a quantized cache; None for a cache in the model's type.
    """

    stored: ClassVar[tuple[int, ...]] = (KEYS, VALUES)
    pages: Tensor
    pages_per_block: int
    layer_offsets: Tensor
    num_heads: int
    block_size: int
    head_size: int
    quantization: Quantization | None = field(default=None, kw_only=True)

    @abstractmethod
    def take(self, page_ids: Tensor, tokens: Tensor, which: int) -> Tensor:
        """Copies the [N, row_size] keys (0) or values (1), as stored, of a token of each of [N]
        pages."""

    @abstractmethod
    def put(self, page_ids: Tensor, tokens: Tensor, which: int, rows: Tensor) -> None:
        """Replaces the key (0) or value (1) of a token of each of [N] pages by [N, row_size] rows
        as stored."""

    @abstractmethod
    def write(self, page_ids: Tensor, *stored: Tensor) -> None:
        """Fills [P] pages with [P, block_size, row_size] rows of everything that is stored."""

    @abstractmethod
    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        """Returns [..., block_size, row_size] keys (0) or values (1) as stored."""

    def read(self, page_ids: Tensor, layer: int, which: int) -> Tensor:
        """Copies [..., block_size, head_size] keys (0) or values (1) of a layer's [...] pages."""
        rows, quantization = self._rows_of(page_ids, which), self.quantization
        return rows if quantization is None else quantization.dequantize(rows, layer, which)

    def keys(self, page_ids: Tensor, layer: int) -> Tensor:
        """Copies the [..., block_size, head_size] keys of a layer's [...] pages."""
        return self.read(page_ids, layer, KEYS)

    def values(self, page_ids: Tensor, layer: int) -> Tensor:
        """Copies the [..., block_size, head_size] values of a layer's [...] pages."""
        return self.read(page_ids, layer, VALUES)

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values that are read, and of queries."""
        return self.pages.dtype if self.quantization is None else self.quantization.dtype

    @property
    def row_size(self) -> int:
        """Elements of a stored key: those of a key, or bytes in a quantized cache."""
        quantization = self.quantization
        return self.head_size if quantization is None else quantization.row_size(self.head_size)

    @property
    def num_layers(self) -> int:
        """Number of layers of the cache group."""
        return int(self.layer_offsets.numel())

    @property
    def page_bytes(self) -> int:
        """Number of bytes of a page."""
        return int(self.pages.shape[1] * self.pages.element_size())

    @property
    def page_shape(self) -> PageShape:
        """Shape of the pages, as policies ask for it."""
        return PageShape(self.num_heads, self.head_size, self.block_size, self.page_bytes)

    @property
    def queries_per_page(self) -> int:
        """Number of queries, of one query head each, that fit into a page."""
        return self.page_bytes // (self.head_size * int(self.dtype.itemsize))

    @cached_property
    def cache_of_one_head(self) -> Tensor:
        """[num_pages, 1, block_size, elements of a token] view, as vLLM's kernels take a cache."""
        return self.pages.view(-1, 1, self.block_size, len(self.stored) * self.row_size)

    @cached_property
    def numbers(self) -> Tensor:
        """[num_pages, n] fp32 view, for pages that hold policy state."""
        return self.pages.view(torch.float32)

    @cached_property
    def block_page_offsets(self) -> Tensor:
        """[num_layers * num_heads] int64 pages of the group inside a block, layer by layer."""
        heads = torch.arange(self.num_heads, device=self.layer_offsets.device)
        return (self.layer_offsets[:, None] + heads).flatten()

    @cached_property
    def _layer_page_offsets(self) -> tuple[Tensor, ...]:
        """[num_heads, 1] page offsets of every layer."""
        offsets: tuple[Tensor, ...] = self.block_page_offsets.view(self.num_layers, -1, 1).unbind()
        return offsets

    def fresh_pages(self, block_ids: Tensor) -> Tensor:
        """[K] blocks -> [K * num_layers * num_heads] int64 pages, in the order of assignment."""
        return (block_ids[:, None] * self.pages_per_block + self.block_page_offsets).flatten()

    def layer_page_ids(self, layer: int, block_ids: Tensor) -> Tensor:
        """[N] int64 blocks -> [num_heads, N] int64 pages of one layer."""
        return block_ids * self.pages_per_block + self._layer_page_offsets[layer]

    def copy_blocks(self, blocks: list[tuple[int, int]]) -> None:
        """Copies the group's pages of (source, target) blocks."""
        sources, targets = upload(np.array(blocks).T.copy(), self.device)
        self.pages[self.fresh_pages(targets)] = self.pages[self.fresh_pages(sources)]

    def write_floats(self, page_ids: Tensor, numbers: Tensor, places: Tensor | None = None) -> None:
        """Fills [P] pages with [m] fp32 numbers, at the first or given places, and zeros."""
        room = page_ids.numel() * self.page_bytes // 4
        if places is None:
            padded = torch.nn.functional.pad(numbers, (0, room - numbers.numel()))
        else:
            padded = numbers.new_zeros(room).scatter_(0, places, numbers)
        self.pages[page_ids] = padded.view(self.pages.dtype).view(page_ids.numel(), -1)


@dataclass(frozen=True)
class PackedPagePool(PagePool):
    """Pages of vLLM's CPU kernels: K, then V, each in an order of its own.

    Attributes:
        packings: order of the elements of K inside a page, and of V.

    Raises:
        InvariantError: packings of other sizes than the page's.
    """

    packings: tuple[Packing, Packing]

    def __post_init__(self) -> None:
        for packing in self.packings:
            sizes = (packing.block_size, packing.head_size)
            if sizes != (self.block_size, self.head_size):
                raise InvariantError(
                    f"expected packings of {self.block_size} tokens of {self.head_size} elements, "
                    f"got {packing.name} of {sizes[0]} of {sizes[1]}; take one of known_packings "
                    "for the page's own sizes."
                )

    @cached_property
    def _halves(self) -> Tensor:
        """[num_pages, 2, elements] view: the K and the V of every page."""
        return self.pages.unflatten(1, (2, -1))

    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        halves = self._halves.flatten(0, 1).index_select(0, (2 * page_ids + which).flatten())
        return self.packings[which].to_rows(halves.view(*page_ids.shape, halves.shape[1]))

    def take(self, page_ids: Tensor, tokens: Tensor, which: int) -> Tensor:
        if self.packings[which].is_rows:
            rows = self.pages.view(-1, self.head_size)
            return rows.index_select(0, (2 * page_ids + which) * self.block_size + tokens)
        return self.packings[which].take_rows(self._halves[:, which], page_ids, tokens)

    def put(self, page_ids: Tensor, tokens: Tensor, which: int, rows: Tensor) -> None:
        self.packings[which].put_rows(self._halves[:, which], page_ids, tokens, rows)

    def write(self, page_ids: Tensor, *stored: Tensor) -> None:
        # numpy copies whole rows, in a seventh of the time of torch's assignment.
        halves = self._halves.flatten(0, 1).view(torch.uint8).numpy()
        for which, rows in zip(self.stored, stored, strict=True):
            packed = self.packings[which].from_rows(rows).view(torch.uint8)
            halves[(2 * page_ids + which).numpy()] = packed.numpy()


@dataclass(frozen=True)
class InterleavedPagePool(PagePool):
    """Pages of GPU kernels, where every token's key and value lie side by side.

    page: block_size rows of [ K: row_size ][ V: row_size ]
    """

    @cached_property
    def _rows(self) -> Tensor:
        """[num_pages, block_size, 2, row_size] view of the pages."""
        return self.pages.unflatten(1, (self.block_size, 2, self.row_size))

    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        return self._rows[:, :, which][page_ids]

    def take(self, page_ids: Tensor, tokens: Tensor, which: int) -> Tensor:
        return self._rows[:, :, which][page_ids, tokens]

    def put(self, page_ids: Tensor, tokens: Tensor, which: int, rows: Tensor) -> None:
        self._rows[:, :, which][page_ids, tokens] = rows

    def write(self, page_ids: Tensor, *stored: Tensor) -> None:
        for which, rows in zip(self.stored, stored, strict=True):
            self._rows[:, :, which][page_ids] = rows

    def entries(self, page_table: Tensor, lengths: Tensor) -> PagedEntries:
        """Returns the `PagedEntries` of sequences as stored, for kernels that read pages."""
        return PagedEntries(self.pages, page_table, lengths, self.block_size, self.row_size)

    def read_entries(self, page_table: Tensor, lengths: Tensor, layer: int) -> PagedEntries:
        """Returns them in the model's type; those of a quantized cache are dequantized into pages
        made for this."""
        if self.quantization is None:
            return self.entries(page_table, lengths)
        size, width = self.block_size, page_table.shape[1]
        starts = torch.arange(width, device=self.device) * size
        page_ids = page_table.to(torch.int64).masked_fill(starts >= lengths.view(-1, 1), 0)
        both = (self.keys(page_ids, layer), self.values(page_ids, layer))
        pages = torch.cat(both, dim=-1).view(-1, 2 * size * self.head_size)
        table = torch.arange(len(pages), device=self.device).view(page_table.shape)
        return PagedEntries(pages, table, lengths, size, self.head_size)


@dataclass(frozen=True)
class LatentPagePool(PagePool):
    """Pages of MLA layers: rows that all query heads read, so a layer has one KV head.

    row: [ latent vector: value_size ][ rotated key: the rest ]

    Absorbed queries multiply the whole row, which is the key. The value is the latent vector; it
    is read with zeros behind, as long as a key.

    Attributes:
        value_size: elements of the latent vector.
    """

    stored: ClassVar[tuple[int, ...]] = (KEYS,)
    value_size: int

    @cached_property
    def rows(self) -> Tensor:
        """[num_pages, block_size, row_size] view of the pages."""
        return self.pages.unflatten(1, (self.block_size, self.row_size))

    def _as(self, which: int, rows: Tensor) -> Tensor:
        """Returns copied rows as keys or values."""
        if which == VALUES:
            rows[..., self.value_size :] = 0
        return rows

    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        return self._as(which, self.rows[page_ids])

    def take(self, page_ids: Tensor, tokens: Tensor, which: int) -> Tensor:
        return self._as(which, self.rows[page_ids, tokens])

    def put(self, page_ids: Tensor, tokens: Tensor, which: int, rows: Tensor) -> None:
        self.rows[page_ids, tokens] = rows

    def write(self, page_ids: Tensor, *stored: Tensor) -> None:
        (rows,) = stored
        self.rows[page_ids] = rows


@dataclass(frozen=True, eq=False)
class PackedKV(KVView):
    """Keys and values in packed pages, gathered when a policy reads them.

    Attributes:
        lengths, num_tail, shorter: as in `KVView`.
        pool: the pages.
        layer: layer of the heads.
        page_table: [H, width] int64 full pages; arbitrary behind a head's last one.
        partial: [H, 0 or 1] int64 pages of the partial last block.
        norms: norms of values that earlier events have computed; None: nothing is remembered.
    """

    lengths: Tensor
    num_tail: int
    pool: PagePool
    layer: int
    page_table: Tensor
    partial: Tensor
    shorter: Tensor | None = None
    norms: PageNorms | None = None

    @property
    def capacity(self) -> int:
        return int(self.page_table.shape[1]) * self.pool.block_size

    @property
    def head_size(self) -> int:
        return self.pool.head_size

    def gather(self, which: int, tail: bool) -> Tensor:
        table = self.partial if tail else self.page_table
        rows = self.pool.read(table, self.layer, which).flatten(1, 2)
        return rows[:, : self.num_tail] if tail else rows

    def projected_norms(self, compute: Callable[[KVView], Tensor]) -> Tensor:
        if self.norms is None:
            return compute(self)
        size = self.pool.block_size

        def behind(first: int) -> Tensor:
            lengths = (self.lengths - first * size).clamp_min(0)
            table = self.page_table[:, first:]
            pages = PackedKV(lengths, 0, self.pool, self.layer, table, self.partial[:, :0])
            return compute(pages)

        return self.norms.read(self.page_table, self.lengths // size, behind)


def divided(cache: Tensor, split: int) -> Tensor:
    """Returns a layer's cache with each block divided into equal parts, which become its blocks.

    The parts of a block lie one behind the other, each with all layers, so that a part is to pages
    what a block was:

        block    [ layer 0: all tokens      ][ layer 1: all tokens      ]
        parts    [ 0, layer 0 ][ 0, layer 1 ][ 1, layer 0 ][ 1, layer 1 ]

    Args:
        cache: [num_blocks, num_kv_heads, block_size, elements of a token] view of an allocation
            in the layout BLHNC.
        split: parts of a block.

    Returns:
        [num_blocks * split, num_kv_heads, block_size / split, elements of a token] view.

    Raises:
        InvariantError: a block is not whole parts.
    """
    num_blocks, num_heads, block_size, content = cache.shape
    stride, offset = cache.stride(0), cache.storage_offset()
    part = num_heads * (block_size // split) * content
    if block_size % split or stride % (split * part) or offset % (split * part):
        raise InvariantError(
            f"expected blocks of {split} whole parts of {part} elements, got shape "
            f"{tuple(cache.shape)} with strides {cache.stride()} at offset {offset}; the KV-cache "
            "layout must be BLHNC, without padding."
        )
    return cache.as_strided(
        (num_blocks * split, num_heads, block_size // split, content),
        (stride // split, block_size // split * content, content, 1),
        offset // split,
    )


class FlatPages(NamedTuple):
    """A cache group's memory as pages.

    Attributes:
        pages: [num_pages, elements of a page].
        per_block: pages of a block, over all layers and heads.
        layer_offsets: first page of each layer inside a block.
    """

    pages: Tensor
    per_block: int
    layer_offsets: list[int]


def flat_pages(layer_caches: list[Tensor]) -> FlatPages:
    """Returns the flat page view over one group's per-layer cache views.

    Args:
        layer_caches: per layer [num_blocks, num_kv_heads, block_size, elements of a token] views
            of one allocation in the layout BLHNC.

    Raises:
        InvariantError: the views are not whole pages of one allocation.
    """
    first = layer_caches[0]
    num_blocks, _, block_size, content = first.shape
    page = block_size * content
    storage = first.untyped_storage()
    offsets = []
    for cache in layer_caches:
        same = cache.untyped_storage().data_ptr() == storage.data_ptr()
        strides = (cache.stride(0) % page, cache.stride(1), cache.stride(2), cache.stride(3))
        if not same or strides != (0, page, content, 1) or cache.storage_offset() % page:
            raise InvariantError(
                f"expected every layer's cache as whole pages of {page} elements in one "
                f"allocation, got shape {tuple(cache.shape)} with strides {cache.stride()} at "
                f"offset {cache.storage_offset()}; the KV-cache layout must be BLHNC."
            )
        offsets.append(cache.storage_offset() // page)
    pages_per_block = first.stride(0) // page
    num_pages = num_blocks * pages_per_block
    available = storage.nbytes() // first.element_size() // page
    flat = torch.as_strided(first, (min(num_pages, available), page), (page, 1), 0)
    return FlatPages(flat, pages_per_block, offsets)
