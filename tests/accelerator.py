"""Stands in for an accelerator where there is none: torch's `meta` device, watched.

Tensors there have shapes and no numbers, so that whatever would wait for an accelerator's numbers
fails: `int(t)`, `if t:`, `t.tolist()`, `t[mask]`, `t.nonzero()`, and operations between devices.
Two things would pass and are refused here: indexing with a tensor of the host, and copies from
the host that wait.

Kernels over pages are launched there, as Triton's are: nobody looks into them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.paged_entries import AddressedEntries
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers

ACCELERATOR = torch.device("meta")


class Synchronised(AssertionError):
    """The host would have waited for the accelerator."""


class _NoMixing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {t.device.type for t in tensors if t.dim()}
        if len(devices) > 1:
            waits = name != "copy_" or not (kwargs.get("non_blocking") or args[2:3] == (True,))
            if waits:
                raise Synchronised(f"{func} takes tensors of {sorted(devices)}")
        target = kwargs.get("device")
        to_accelerator = target is not None and torch.device(target) == ACCELERATOR
        if (
            name == "_to_copy"
            and to_accelerator
            and devices == {"cpu"}
            and not kwargs.get("non_blocking")
        ):
            raise Synchronised("a copy to the accelerator that waits; use upload")
        return func(*args, **kwargs)


class _NoLiterals(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        to_accelerator = device is not None and torch.device(device) == ACCELERATOR
        if to_accelerator and func in (torch.tensor, torch.as_tensor, torch.asarray):
            raise Synchronised(f"torch.{func.__name__} to the accelerator waits; use upload")
        return func(*args, **kwargs)


@contextmanager
def launched() -> Iterator[None]:
    """Kernels give what their twins give, and what these do goes unseen."""
    choose = dispatch.takes_triton

    def takes_triton(device: torch.device) -> bool:
        return device == ACCELERATOR or choose(device)

    with mock.patch.multiple(dispatch, takes_triton=takes_triton, triton_kernel=stand_in):
        yield


def twin_of(module: str, name: str) -> Any:
    """The torch operator beside the launcher `name` of `vllm_kvcompress.kernels.<module>`."""
    operators = module.removesuffix("_triton")
    if module.startswith("attention."):
        operators = module.partition(".")[0]
    return dispatch.twin(
        getattr(importlib.import_module(f"vllm_kvcompress.kernels.{operators}"), name)
    )


def stand_in(module: str, name: str) -> Any:
    """A launch of `name` that gives what its twin gives."""
    # Some twins read numbers.
    reading = {
        "nearest_keys": _nearest_keys,
        "decode_rows": _decode_rows,
    }
    twin = reading.get(name) or twin_of(module, name)

    def launch(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            by_address = isinstance(args[0], AddressedNumbers)
            return None if by_address else twin(*args, **kwargs)

    return launch


def _nearest_keys(view: KVView, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(kept, dtype=torch.float32), torch.zeros_like(kept, dtype=torch.int64)


def _decode_rows(
    rows: AddressedEntries,
    queries: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    bias: AddressedNumbers | None = None,
    with_lse: bool = False,
) -> torch.Tensor | None:
    group = queries.shape[1] // rows.num_heads
    return queries.new_zeros(len(rows.lengths), group) if with_lse else None


@contextmanager
def watched() -> Iterator[None]:
    """Fails where the host would wait for the accelerator, or compute on both."""
    with _NoLiterals(), _NoMixing(), launched():
        yield


class Operators(TorchDispatchMode):
    """Counts operators that make or write numbers, and not only look at some."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        views = all(
            returned.alias_info is not None and not returned.alias_info.is_write
            for returned in func._schema.returns
        )
        only_room = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
        self.count += not (views or only_room)
        return results
