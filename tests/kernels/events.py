"""Whole events whose kernels are all Triton's; for a child process in which Triton interprets."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.event_cases import Request, left_by, make_pool
from tests.policies.cases import Shape, make_pipeline
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.kernels import dispatch


def leave(
    policy: str, params: dict[str, object], shape: Shape, directory: Path, triton: bool
) -> tuple[list[list[dict[str, Any]]], set[str]]:
    """What the first event leaves and what a second one does, and the launchers that were used.

    Args:
        policy: of `tests.policies.cases.POLICIES`.
        params: its parameters.
        shape: of the request.
        directory: for profiles.
        triton: whether the kernels are Triton's.
    """
    taken: set[str] = set()
    with only_triton(taken) if triton else nullcontext():
        pipeline = make_pipeline(policy, shape, directory, **params)
        request = Request(pipeline, make_pool(InterleavedPagePool))
        left = []
        for position in request.positions:
            request.compress(position)
            left.append(left_by(request))
    return left, taken


def in_triton(test: str, *args: Any) -> None:
    """Runs the test of that dotted name with all kernels Triton's."""
    with only_triton():
        pkgutil.resolve_name(test)(*args)


@contextmanager
def kernel_names() -> Iterator[list[str]]:
    """The names of all kernels that are launched, one after the other."""
    from triton.runtime.interpreter import GridExecutor

    names: list[str] = []
    run = GridExecutor.__call__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        run(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", noting):
        yield names


@contextmanager
def only_triton(taken: set[str] | None = None) -> Iterator[None]:
    """All kernels are Triton's, wherever tensors are; `taken` gets the names of those used."""
    find, choose = dispatch.triton_kernel, dispatch.takes_triton

    def noting(module: str, name: str) -> Any:
        if taken is not None:
            taken.add(name)
        return find(module, name)

    def always(device: torch.device) -> bool:
        return True

    dispatch.triton_kernel, dispatch.takes_triton = noting, always
    try:
        yield
    finally:
        dispatch.triton_kernel, dispatch.takes_triton = find, choose
