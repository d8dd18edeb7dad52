"""Kernels over pages as shapes: what they return looks like what the twins return."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.backends import moved
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from vllm_kvcompress.kernels import (
    paged_shapes,
    paged_torch,
    selection,
    selection_shapes,
    selection_torch,
)
from vllm_kvcompress.kernels.dispatch import by_device
from vllm_kvcompress.kernels.moments_torch import moment_size
from vllm_kvcompress.kernels.paged_numbers import PagedNumbers

ENTRIES = make_entries([40, 21], dtype=torch.bfloat16)
CAPACITY, DIMS = ENTRIES.capacity, ENTRIES.head_size
FLAGS = torch.ones(2, CAPACITY, dtype=torch.bool)
WEIGHTS = torch.ones(2, CAPACITY)
QUERIES = random(2, 4, 5, DIMS, dtype=torch.bfloat16)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add_to_moments": (torch.zeros(2, moment_size(DIMS)), FLAGS),
    "compact_pages": (torch.tensor([1, 1]), torch.arange(32) % 16, torch.tensor([0, 1])),
    "decode_attention": (QUERIES[:, :, 0], 0.1),
    "key_distances": (torch.zeros(2, CAPACITY, dtype=torch.int64),),
    "keydiff_scores": ("mean_raw",),
    "merge_groups": (torch.zeros(2, CAPACITY, dtype=torch.bool), WEIGHTS, WEIGHTS),
    "merge_into": (FLAGS, torch.zeros(2, CAPACITY, dtype=torch.int64), WEIGHTS),
    "moment_residuals": (torch.zeros(2, moment_size(DIMS)), 0.1),
    "nearest_keys": (FLAGS,),
    "neighbour_cosines": (),
    "prefill_attention": (QUERIES, 0.1, PagedNumbers.of_rows(WEIGHTS)),
    "spread_values": (FLAGS, WEIGHTS, 3),
    "value_residuals": (WEIGHTS, 2, 3),
    "value_norms_l1": (random(2, DIMS, 2, 128, dtype=torch.bfloat16), FLAGS),
    "value_norms_l2": (random(4, DIMS, DIMS),),
    "window_mass": (3, random(5, 4, DIMS, dtype=torch.bfloat16), 0.1),
    "window_perturbation": (3, random(5, 4, DIMS, dtype=torch.bfloat16), 0.1, "joint"),
}


def looks(value: Any) -> Any:
    """Shapes and types."""
    if isinstance(value, tuple):
        return [looks(item) for item in value]
    return None if value is None else (tuple(value.shape), value.dtype)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_results_have_the_twins_shapes_and_types(name: str) -> None:
    twin, shapes = getattr(paged_torch, name), getattr(paged_shapes, name)
    assert inspect.signature(shapes) == inspect.signature(twin)
    expected = looks(twin(ENTRIES, *ARGUMENTS[name]))
    assert looks(shapes(moved(ENTRIES, "meta"), *moved(ARGUMENTS[name], "meta"))) == expected


@pytest.mark.parametrize("name", ARGUMENTS)
def test_only_pages_without_numbers_take_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for module in (paged_shapes, paged_torch):

        def noting(*_: Any, module: ModuleType = module) -> None:
            taken.append(module)

        noting.__name__ = name
        monkeypatch.setattr(module, name, noting)
    kernel = by_device(getattr(paged_torch, name), paged_shapes, "no_triton")
    for device in ("meta", "cpu"):
        kernel(moved(ENTRIES, device), *moved(ARGUMENTS[name], device))
    assert taken == [paged_shapes, paged_torch]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("top_entries", (WEIGHTS, FLAGS, torch.tensor([3, 5]))),
        ("apportion", (torch.ones(2), 9, torch.tensor([1, 1]), torch.tensor([8, 8]))),
    ],
)
def test_selections_have_the_twins_shapes_and_types(name: str, arguments: tuple[Any, ...]) -> None:
    twin, call = getattr(selection_torch, name), getattr(selection, name)
    assert inspect.signature(getattr(selection_shapes, name)) == inspect.signature(twin)
    found = call(*moved(arguments, "meta"))
    assert found.is_meta
    assert looks(found) == looks(call(*arguments))


def moment_split() -> int:
    """As the kernel has it; where Triton may be imported."""
    from vllm_kvcompress.kernels import moments_triton

    return moments_triton.TILE * moments_triton.SPLIT_TILES


def test_splits_are_those_of_the_kernels(compiler: Child) -> None:
    assert compiler.call("tests.kernels.test_shapes.moment_split") == paged_shapes.MOMENT_SPLIT
