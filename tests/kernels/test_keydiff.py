"""KeyDiff over pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels import paged_torch

KEYDIFF = "vllm_kvcompress.kernels.keydiff_triton.keydiff_scores"
ANCHORS = ["mean_normalized", "mean_raw", "pairwise"]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_twin_is_the_oracle(anchor: str) -> None:
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    scores = paged_torch.keydiff_scores(entries, anchor)
    assert_close(scores, torch.tensor(oracles.keydiff(entries, anchor)), torch.float32)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 32), (128, 128), (256, 64)])
def test_is_the_twin(backend: Backend, anchor: str, head_size: int, block_size: int) -> None:
    entries = make_entries([200, 0, 1, 45], block_size, head_size, backend.dtype)
    expected = backend.twin(paged_torch.keydiff_scores, entries, anchor)
    scores = backend.call(KEYDIFF, entries, anchor)
    # Inputs are the same 16-bit numbers for both, and all sums are in fp32.
    assert_close(scores, expected, torch.float32)


def test_zero_keys_score_nothing(backend: Backend) -> None:
    entries = make_entries([20], dtype=backend.dtype)
    entries.pages.zero_()
    assert not backend.call(KEYDIFF, entries, "mean_normalized").any()


def test_what_a_launch_refuses(interpreter: Child) -> None:
    with pytest.raises(InvariantError, match="'median'; other anchors need the keys gathered"):
        interpreter.call(KEYDIFF, make_entries([5]), "median")
