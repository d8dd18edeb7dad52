"""How many pages each layer and each head gets.

A layer's total is fixed before any layer runs, so that each can be compressed as soon as it has
been computed; the division among a layer's heads may look at scores. Totals are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvcompress.kernels.selection import apportion, top_entries
from vllm_kvcompress.kernels.transfers import upload
from vllm_kvcompress.policies.base import Allocator, LayerView
from vllm_kvcompress.policies.protect import NOTHING_PROTECTED, Protection
from vllm_kvcompress.policies.rounding import spread


@lru_cache(maxsize=1024)
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A layer's settings as a tensor, copied once."""
    return upload(torch.tensor(values, dtype=dtype), device)


@dataclass(frozen=True)
class Uniform:
    """The same for every layer and head; also what the other allocators start from.

    Attributes:
        skip_layers: the first layers keep everything, at the expense of the others, as long as
            these keep at least half of a uniform budget.
    """

    skip_layers: int = 0

    @property
    def layer_dependent(self) -> bool:
        """Whether some layers are skipped."""
        return self.skip_layers > 0

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer."""
        total = num_blocks * num_heads * len(capacity)
        skipped = self._num_skipped(num_blocks, capacity, num_heads)
        floor = [*capacity[:skipped], *([0] * (len(capacity) - skipped))]
        return spread([1.0] * len(capacity), total, capacity, floor)

    def head_pages(self, view: LayerView, scores: Tensor, total: int, floor: int) -> Tensor:
        """[H] int64 pages of each head."""
        return divide(view, torch.ones_like(view.lengths, dtype=torch.float32), total, floor)

    def _num_skipped(self, num_blocks: int, capacity: list[int], num_heads: int) -> int:
        total = num_blocks * num_heads * len(capacity)
        for skipped in range(min(self.skip_layers, len(capacity) - 1), 0, -1):
            left = total - sum(capacity[:skipped])
            if left * 2 >= num_blocks * num_heads * (len(capacity) - skipped):
                return skipped
        return 0


def divide(view: LayerView, shares: Tensor, total: int, floor: int) -> Tensor:
    """A layer's pages divided among its heads by shares, each at least `floor` where it fits."""
    cap = torch.div(view.lengths, view.block_size, rounding_mode="floor")
    least = torch.full_like(cap, min(floor, total // cap.numel()))
    return apportion(shares, total, torch.minimum(least, cap), cap)


@dataclass(frozen=True)
class Pyramid:
    """PyramidKV (arXiv 2406.02069): budgets fall linearly from the first layer to the last.

    Attributes:
        window_size: the observation window, which every layer keeps.
        beta: how steep; the last layer's budget beyond the window is 1/beta of the mean.
    """

    layer_dependent: ClassVar[bool] = True

    window_size: int = 32
    beta: float = 20.0
    block_size: int = 0

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer, in whole pages per head."""
        num_layers = len(capacity)
        if num_layers == 1:
            return [num_blocks * num_heads]
        per_head = [pages // num_heads for pages in capacity]
        window = self.window_size / self.block_size
        mean = num_blocks - window
        shares = [1.0] * num_layers
        if mean > 0:
            low = mean / self.beta
            high = 2 * mean - low
            room = max(per_head) - window
            if high > room:
                high, low = room, 2 * mean - room
            step = (high - low) / (num_layers - 1)
            shares = [window + high - layer * step for layer in range(num_layers)]
        units = spread(shares, num_blocks * num_layers, per_head, [1] * num_layers)
        return [pages * num_heads for pages in units]

    def head_pages(self, view: LayerView, scores: Tensor, total: int, floor: int) -> Tensor:
        """[H] int64, the same for every head."""
        return divide(view, torch.ones_like(view.lengths, dtype=torch.float32), total, floor)


@dataclass(frozen=True)
class Ada:
    """AdaKV (arXiv 2407.11550): heads get budgets by how many of a layer's best tokens are theirs.

    With c the mean selectable budget of a head and m_h its tokens among the layer's top H*c:
    `blend` gives (1 - phi) * m_h + phi * c, `floor` first gives every head its best phi * c.

    Attributes:
        safeguard: phi.
        mode: blend (the authors' code) or floor (kvpress, CriticalKV's code).
        protection: entries that do not compete.
        layers: divides the budget among the layers.
    """

    safeguard: float = 0.2
    mode: str = "blend"
    protection: Protection = NOTHING_PROTECTED
    layers: Allocator = Uniform()

    @property
    def layer_dependent(self) -> bool:
        """As what divides the budget among the layers."""
        return self.layers.layer_dependent

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """As what divides the budget among the layers."""
        return self.layers.layer_pages(num_blocks, capacity, num_heads, num_logical_blocks)

    def head_pages(self, view: LayerView, scores: Tensor, total: int, floor: int) -> Tensor:
        """[H] int64 pages of each head."""
        num_heads, num_entries = scores.shape
        mean = total * view.block_size // num_heads
        protected = self.protection.mask(view, view.lengths.clamp_max(mean))
        valid = view.valid
        num_protected = protected.sum(dim=1)
        selectable = (total * view.block_size - num_protected.sum()).clamp_min(0)
        share = selectable / num_heads
        candidates = scores.masked_fill(protected, float("-inf"))
        if self.mode == "floor":
            least = (self.safeguard * share).floor().to(torch.int64).expand(num_heads)
            best = top_entries(candidates, valid & ~protected, least)
            candidates = candidates.masked_fill(best, float("inf"))
        open_entries = (valid & ~protected).flatten()[None]
        won = top_entries(candidates.flatten()[None], open_entries, selectable[None])
        won_per_head = won.view(num_heads, num_entries).sum(dim=1).float()
        if self.mode == "blend":
            won_per_head = (1 - self.safeguard) * won_per_head + self.safeguard * share
        return divide(view, won_per_head + num_protected, total, floor)


@dataclass(frozen=True)
class HeadTable:
    """HeadKV (arXiv 2410.19258): a pool of all heads' budgets divided by measured importance.

    With c the mean budget beyond the window, every head gets the window, c - c / beta, and of
    the pool of all c / beta a share by its score. What a full head cannot take stays in its layer.

    Attributes:
        table: importance by layer and KV head, summing to 1; empty until bound to a model.
        beta: 1/beta of every budget is pooled.
        window_size: tokens of the observation window, which every head keeps.
        block_size: tokens of a page.
    """

    layer_dependent: ClassVar[bool] = True

    table: tuple[tuple[float, ...], ...] = ()
    beta: float = 1.01
    window_size: int = 32
    block_size: int = 0

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: the sum of its heads'."""
        window = self._window(num_blocks)
        mean = num_blocks - window
        shares = [
            sum(window + mean * part for part in self._parts(layer))
            for layer in range(len(capacity))
        ]
        total = num_blocks * num_heads * len(capacity)
        return spread(shares, total, capacity, [num_heads] * len(capacity))

    def head_pages(self, view: LayerView, scores: Tensor, total: int, floor: int) -> Tensor:
        """[H] int64 pages of each head."""
        parts = self._parts(view.layer)
        window = self._window(total / len(parts))
        # The mean of all layers that gives this layer its total.
        mean = (total - window * len(parts)) / sum(parts)
        shares = window + mean * _on_device(parts, torch.float64, scores.device)
        return divide(view, shares, total, floor)

    def _window(self, mean_pages: float) -> float:
        return min(self.window_size / self.block_size, mean_pages)

    def _parts(self, layer: int) -> tuple[float, ...]:
        """By head, its budget beyond the window as a multiple of the mean."""
        num_all = len(self.table) * len(self.table[0])
        even = 1 - 1 / self.beta
        return tuple(even + score * num_all / self.beta for score in self.table[layer])


@dataclass(frozen=True)
class RetrievalHeads:
    """DuoAttention (arXiv 2410.10819): some heads keep everything, the others sinks and recent.

    How many heads can keep everything follows from the budget; those with the highest gates do,
    and the one after them keeps what is left.

    Attributes:
        gates: by layer and KV head; empty until bound to a model.
        num_streaming: tokens that a streaming head keeps (sinks and recent ones).
        block_size: tokens of a page.
    """

    layer_dependent: ClassVar[bool] = True

    gates: tuple[tuple[float, ...], ...] = ()
    num_streaming: int = 384
    block_size: int = 0

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: everything for its retrieval heads, a few for the others.

        A head that keeps everything has `num_logical_blocks` pages.
        """
        full = num_logical_blocks or max(capacity) // num_heads
        few = min(self._few, num_blocks)
        pages = [few * num_heads] * len(capacity)
        left = num_blocks * num_heads * len(capacity) - sum(pages)
        for layer in self._layers_by_gate():
            more = min(left, max(0, full - few))
            pages[layer] += more
            left -= more
        shares = [float(count) for count in pages]
        within = [min(count, most) for count, most in zip(pages, capacity, strict=True)]
        return spread(shares, sum(pages) + left, capacity, within)

    def head_pages(self, view: LayerView, scores: Tensor, total: int, floor: int) -> Tensor:
        """[H] int64 pages of each head: a few for all, then by gate up to everything."""
        cap = torch.div(view.lengths, view.block_size, rounding_mode="floor")
        few = torch.full_like(cap, min(self._few, total // cap.numel()))
        least = torch.minimum(few, cap)
        order = _on_device(self._heads_by_gate(view.layer), torch.int64, cap.device)
        room = (cap - least)[order]
        before = room.cumsum(0) - room
        more = (total - least.sum() - before).clamp_min(0).minimum(room)
        return least.index_add(0, order, more)

    @property
    def _few(self) -> int:
        return math.ceil(self.num_streaming / self.block_size)

    def _heads_by_gate(self, layer: int) -> tuple[int, ...]:
        row = self.gates[layer]
        return tuple(sorted(range(len(row)), key=lambda head: -row[head]))

    def _layers_by_gate(self) -> list[int]:
        """Layer of each head, from the highest gate to the lowest."""
        gates = [(-gate, layer) for layer, row in enumerate(self.gates) for gate in row]
        return [layer for _, layer in sorted(gates)]
