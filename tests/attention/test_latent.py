"""Absorbed queries give the logits of queries, on keys that are projected from latent rows."""

from __future__ import annotations

import pytest
import torch

from vllm_kvcompress.attention.latent import AbsorbedQueries, absorb

HEADS, NOPE, ROPE, RANK = 3, 4, 2, 5


def test_absorbed_queries_multiply_rows_as_queries_multiply_projected_keys() -> None:
    queries, up_keys = torch.randn(7, HEADS, NOPE + ROPE), torch.randn(HEADS, NOPE, RANK)
    row = torch.randn(RANK + ROPE)
    absorbed = absorb(queries, up_keys)
    for token in range(7):
        for head in range(HEADS):
            key = [float(up_keys[head, dim] @ row[:RANK]) for dim in range(NOPE)]
            key += row[RANK:].tolist()
            pairs = zip(queries[token, head].tolist(), key, strict=True)
            expected = sum(query * number for query, number in pairs)
            assert float(absorbed[token, head] @ row) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("num_decoded", "num_others"), [(0, 5), (4, 0), (4, 5)])
def test_rows_of_a_step_are_absorbed_when_they_are_read(num_decoded: int, num_others: int) -> None:
    queries = torch.randn(num_decoded + num_others, HEADS, NOPE + ROPE)
    up_keys = torch.randn(HEADS, NOPE, RANK)
    expected = absorb(queries, up_keys)
    rows = AbsorbedQueries(
        expected[:num_decoded] if num_decoded else None,
        queries[num_decoded:] if num_others else None,
        up_keys,
    )
    for which in (torch.tensor([3, 0, num_decoded + num_others - 1]), slice(1, 4), slice(2, None)):
        torch.testing.assert_close(rows[which], expected[which])
