"""OBCache's scores over pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.window_perturbation import window_perturbation

VARIANTS = ["value", "key", "joint"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_tail", "stride"), [(0, 1), (2, 1), (3, 1), (2, 2), (0, 3)])
def test_twin_equals_the_oracle(num_tail: int, stride: int, variant: str) -> None:
    """One head is shorter than the window."""
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    queries = random(5, 6, 8)
    how = (queries, 0.3, variant, stride)
    changes = window_perturbation(PagedKV.of(entries, num_tail), *how)
    expected = oracles.perturbation(entries, num_tail, *how)
    assert_close(changes, torch.tensor(expected), torch.float32)
    assert changes.any()


def test_no_change_is_negative() -> None:
    """An entry seen alone gives its value as the output, except for rounding."""
    entries = make_entries([1] * 50, block_size=4, head_size=8)
    changes = window_perturbation(PagedKV.of(entries), random(1, 50, 8), 2.0, "key")
    assert (changes >= 0).all()
    assert (changes < 0.01).all()
    assert changes.any()


def test_no_queries_change_nothing() -> None:
    entries = make_entries([20])
    changes = window_perturbation(PagedKV.of(entries), random(0, 4, 64), 1.0, "value")
    assert changes.shape == (1, entries.capacity)
    assert not changes.any()
