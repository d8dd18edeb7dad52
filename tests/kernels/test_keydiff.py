"""KeyDiff's scores over pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.keydiff import keydiff_scores

ANCHORS = ["mean_normalized", "mean_raw"]


@pytest.mark.parametrize("anchor", ANCHORS)
def test_twin_equals_the_oracle(anchor: str) -> None:
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    scores = keydiff_scores(PagedKV.of(entries), anchor)
    assert_close(scores, torch.tensor(oracles.keydiff(entries, anchor)), torch.float32)


def test_zero_keys_score_nothing() -> None:
    entries = make_entries([20])
    entries.pages.zero_()
    assert not keydiff_scores(PagedKV.of(entries), "mean_normalized").any()
