"""Whole events whose kernels are all Triton's; for a child process in which Triton interprets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.event_cases import Request, left_by, make_pool
from tests.policies.cases import Shape, make_pipeline
from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.pages import InterleavedPagePool


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
    find, choose = dispatch.triton_kernel, dispatch.implementation

    def noting(module: str, name: str) -> Any:
        taken.add(name)
        return find(module, name)

    def always(device: torch.device) -> str:
        return "triton"

    dispatch.triton_kernel = noting
    dispatch.implementation = always if triton else choose
    try:
        pipeline = make_pipeline(policy, shape, directory, **params)
        request = Request(pipeline, make_pool(InterleavedPagePool))
        left = []
        for position in request.positions:
            request.compress(position)
            left.append(left_by(request))
    finally:
        dispatch.triton_kernel, dispatch.implementation = find, choose
    return left, taken
