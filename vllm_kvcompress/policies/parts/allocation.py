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


class Allocator:
    """The same for every layer and head, unless a policy says otherwise.

    Attributes:
        batches: as of `Pipeline`.
    """

    batches: ClassVar[bool] = True

    @property
    def layer_dependent(self) -> bool:
        """Whether layers get different budgets."""
        return False

    def bind(self, model: ModelHeads) -> Self:
        """The same for one model and one rank's heads."""
        return self

    def layer_pages(
        self, num_blocks: int, capacity: list[int], num_heads: int, num_logical_blocks: int = 0
    ) -> list[int]:
        """Pages of each layer: at most `capacity[l]`, in sum `num_blocks * num_heads * layers`.

        Args:
            num_blocks: fresh blocks of the event; one is a page for every layer and head.
            capacity: pages that each layer holds now, over all its heads.
            num_heads: KV heads of this rank.
            num_logical_blocks: full blocks of the request's tokens, kept or not; 0 if nothing
                was compressed before.
        """
        return spread([1.0] * len(capacity), num_blocks * num_heads * len(capacity), capacity)

    def head_pages(self, view: LayerView, scores: Tensor, total: Tensor, floor: Tensor) -> Tensor:
        """[H] int64 pages of each head, at most its length.

        Args:
            view: the layer.
            scores: [H, n] of its entries.
            total: [R] int64 pages of each request: the sum over its heads.
            floor: [R] int64 least pages of a head, where it has them.
        """
        lengths = view.by_request(view.lengths)
        on_cpu = lengths.device.type == "cpu" and not dispatch.takes_triton(lengths.device)
        if on_cpu and bool((lengths == lengths[:, :1]).all()):
            # As before any other event, in a tenth of the operators of the kernel's twin.
            whole, rest = total[:, None] // lengths.shape[1], total[:, None] % lengths.shape[1]
            return (whole + (torch.arange(lengths.shape[1]) < rest)).flatten()
        return divide(view, torch.ones_like(view.lengths, dtype=torch.float32), total, floor)


UNIFORM = Allocator()


def divide(view: LayerView, shares: Tensor, total: Tensor, floor: Tensor) -> Tensor:
    """A request's pages divided among its heads by shares, each at least `floor` where it fits."""
    cap = view.by_request(torch.div(view.lengths, view.block_size, rounding_mode="floor"))
    least = torch.minimum(floor, total // cap.shape[1])[:, None].minimum(cap)
    return apportion(view.by_request(shares), total, least, cap).flatten()


def spread(
    shares: Sequence[float], total: int, capacity: Sequence[int], floor: Sequence[int] | None = None
) -> list[int]:
    """`total` pages divided among layers by shares, on the host, as `apportion` divides.

    Args:
        shares: non-negative, by layer; all zero means equal.
        total: at most the sum of `capacity`.
        capacity: most pages of each layer.
        floor: least pages of each layer; ignored where they do not fit.
    """
    most = torch.tensor(capacity, device="cpu")
    least = torch.minimum(torch.tensor(floor or [0] * len(capacity), device="cpu"), most)
    if int(least.sum()) > total:
        least = torch.zeros_like(most)
    weights = torch.tensor(shares, dtype=torch.float64, device="cpu")
    whole = torch.tensor([total], device="cpu")
    pages = twin(apportion)(weights[None], whole, least[None], most[None])
    found: list[int] = pages[0].tolist()
    return found
