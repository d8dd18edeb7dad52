"""KeyDiff over pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries
from vllm_kvcompress.kernels import paged_torch

ANCHORS = ["mean_normalized", "mean_raw", "pairwise"]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_twin_is_the_oracle(anchor: str) -> None:
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    scores = paged_torch.keydiff_scores(entries, anchor)
    assert_close(scores, torch.tensor(oracles.keydiff(entries, anchor)), torch.float32)


def test_zero_keys_score_nothing() -> None:
    entries = make_entries([20])
    entries.pages.zero_()
    assert not paged_torch.keydiff_scores(entries, "mean_normalized").any()
