"""Warming up compiles all that requests need: none of them waits for Triton."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.event_cases import GROUP
from tests.kernels.child import Child
from tests.policies.cases import Shape

# Blocks as vLLM has them on GPUs: of 16 tokens or a multiple.
SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=16)
CASES: list[tuple[str, dict[str, object]]] = [
    ("pyramidkv+adakv+criticalkv", {"norm": "l1"}),
    ("keydiff", {}),
    ("snapkv+obcache", {}),
    ("h2o+cam", {}),
    ("d2o", {}),
    ("momentkv", {}),
    ("kvmerger", {}),
    ("kvslimmer", {}),
]


@pytest.fixture(scope="module")
def noting() -> Iterator[Child]:
    """A process in which no kernel was imported before they are noted."""
    process = Child(interprets=True)
    yield process
    process.close()


@pytest.mark.parametrize(("policy", "params"), CASES, ids=[case[0] for case in CASES])
def test_requests_need_no_kernel_that_was_not_warmed_up(
    policy: str, params: dict[str, object], tmp_path: Path, noting: Child
) -> None:
    warm, missing = noting.call(
        "tests.kernels.variants.not_warmed_up", policy, params, SHAPE, tmp_path
    )
    assert warm > 2
    assert missing == []


def test_several_requests_need_no_kernel_that_one_does_not(tmp_path: Path, noting: Child) -> None:
    """Steps that may be replayed, and others."""
    warm, missing = noting.call("tests.kernels.variants.not_compiled_for_one", tmp_path)
    assert warm > 2
    assert missing == []
