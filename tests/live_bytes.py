"""Counts live tensor bytes where no allocator keeps statistics."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and alive at the same time.

    Attributes:
        live: now.
        peak: at most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        former = {storage_of(tensor)._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(results):
            storage = storage_of(tensor)
            if storage._cdata not in former:
                former.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return results

    def _release(self, size: int) -> None:
        self.live -= size


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> Any:
    return tensor.untyped_storage()
