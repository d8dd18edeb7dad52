"""How many pages each layer and each head gets.

A layer's total is fixed before any layer runs, so that each can be compressed as soon as it has
been computed; the division among a layer's heads may look at scores. Totals are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.kernels.apportion import apportion
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.policies.base import LayerView, ModelHeads
from vllm_kvcompress.policies.parts.selection import Protection


class Allocator:
    """Gives every layer and head the same, unless a policy overrides it.

    Attributes:
        batches: see `Pipeline.batches`.
        any_order: see `Pipeline.any_order`.
    """

    batches: ClassVar[bool] = True
    any_order: ClassVar[bool] = True

    @property
    def layer_dependent(self) -> bool:
        """Whether layers get different budgets."""
        return False

    def bind(self, model: ModelHeads) -> Self:
        """The allocator for one model and one rank's heads."""
        return self

    def beside(self, protection: Protection) -> Self:
        """The allocator where these tokens are protected."""
        return self

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: at most `capacity[l]`, in sum `num_blocks * num_heads * layers`.

        Args:
            num_blocks: fresh blocks of the event; one holds a page of every layer and head.
            capacity: pages that each layer holds now, over all its heads.
            num_heads: KV heads of this rank.
            num_logical_blocks: full blocks of the request's tokens, kept or not; 0 if nothing
                was compressed before.
        """
        if (pages := num_blocks * num_heads) <= min(capacity):
            return [pages] * len(capacity)
        return spread([1.0] * len(capacity), pages * len(capacity), capacity)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        """[H] int64 pages of each head, at most as many as it holds.

        Args:
            view, scores: the layer, and [H, n] scores of its entries.
            total: [R] int64 pages of each request: the sum over its heads.
            floor: [R] int64 fewest pages of a head, where it holds as many.
        """
        lengths = view.by_request(view.lengths)
        on_cpu = lengths.device.type == "cpu" and not dispatch.takes_triton(lengths.device)
        if on_cpu and bool((lengths == lengths[:, :1]).all()):
            # Heads of equal length, as at a first event, need a tenth of `divide`'s operators.
            pages, rest = total[:, None] // lengths.shape[1], total[:, None] % lengths.shape[1]
            return (pages + (torch.arange(lengths.shape[1]) < rest)).flatten()
        return divide(view, torch.ones_like(view.lengths, dtype=torch.float32), total, floor)


UNIFORM = Allocator()


def pages_held(view: LayerView) -> Tensor:
    """[R, heads] int64 pages that each head holds in full blocks."""
    return view.by_request(torch.div(view.lengths, view.block_size, rounding_mode="floor"))


def divide(view: LayerView, shares: Tensor, total: Tensor, floor: Tensor) -> Tensor:
    """Divides each request's pages among its heads by shares, each at least `floor` if it fits."""
    held = pages_held(view)
    fewest = torch.minimum(floor, total // held.shape[1])[:, None].minimum(held)
    return apportion(view.by_request(shares), total, fewest, held).flatten()


def spread(
    shares: Sequence[float], total: int, capacity: Sequence[int], floor: Sequence[int] | None = None
) -> list[int]:
    """Divides `total` pages among layers by shares, on the host, as `apportion` does.

    Args:
        shares: non-negative, by layer; all zero means equal.
        total: at most the sum of `capacity`.
        capacity: most pages of each layer.
        floor: fewest pages of each layer; ignored where they do not fit.
    """
    most = torch.tensor(capacity, device="cpu")
    fewest = torch.minimum(torch.tensor(floor or [0] * len(capacity), device="cpu"), most)
    if int(fewest.sum()) > total:
        fewest = torch.zeros_like(most)
    weights = torch.tensor(shares, dtype=torch.float64, device="cpu")
    totals = torch.tensor([total], device="cpu")
    pages: list[int] = twin(apportion)(weights[None], totals, fewest[None], most[None])[0].tolist()
    return pages


def spread_within(pages: list[int], total: int, capacity: list[int]) -> list[int]:
    """Cuts pages of layers to `capacity`, and divides what is left of `total` in proportion."""
    fitting = [min(count, most) for count, most in zip(pages, capacity, strict=True)]
    return spread([float(count) for count in pages], total, capacity, fitting)
