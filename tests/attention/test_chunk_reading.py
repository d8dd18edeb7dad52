"""What a chunk of a prompt reads: one choice for all of its queries, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention.test_reading import HEAD_SIZE, HEADS, KINDS, SIZE, chosen, products, small_pool
from vllm_kvcompress.attention.batch import CompressedRows, ResidentBatch
from vllm_kvcompress.attention.reading import SparseReads
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.kernels import page_choice
from vllm_kvcompress.kernels.page_choice import Choice, PageLists
from vllm_kvcompress.scheduling.plan import ReadPlan
from vllm_kvcompress.scheduling.read_rule import ReadRule

CHUNK = 2 * SIZE
RULE = ReadRule.parse(f"longcache:global=4,local=4,span=4,top=2,prefill={CHUNK}", 0)


@pytest.mark.parametrize("score", KINDS)
def test_many_queries_choose_together(monkeypatch: pytest.MonkeyPatch, score: str) -> None:
    """There are more queries than are looked at at once."""
    monkeypatch.setattr(page_choice, "QUERIES_AT_ONCE", 16)
    torch.manual_seed(3)
    pool = small_pool()
    table = torch.stack([torch.randperm(40)[:9] for _ in range(2)]).to(torch.int32)
    counts, read = torch.tensor([9, 7]), torch.tensor([5, 4])
    asked = torch.randn(2, 37, HEAD_SIZE)
    choice = Choice(6, 1, 2)
    found = chosen(pool, asked, PageLists(table, counts, read), choice, score)
    for row, (count, number) in enumerate(zip(counts.tolist(), read.tolist(), strict=True)):
        scores = {}
        for index in range(1, count - 2):
            keys = pool.keys(table[row, index].long(), 0).tolist()
            by_query = [products(keys, query, score) for query in asked[row].tolist()]
            scores[index] = max(by_query)
        best = sorted(scores, key=lambda page: -scores[page])[: number - 3]
        expected = sorted([0, *best, count - 2, count - 1])
        assert found[row, :number].tolist() == [int(table[row, page]) for page in expected]


def batch_of(found: SparseReads, names: list[str], lengths: list[int]) -> ResidentBatch:
    """All requests that have a page table."""
    tables = found.tables.slots
    compressed = CompressedRows.of(
        np.array([row if name in tables else -1 for row, name in enumerate(names)]),
        torch.device("cpu"),
    )
    rows = compressed.rows
    return ResidentBatch(
        **vars(compressed),
        page_table=torch.arange(len(rows) * HEADS * 16, dtype=torch.int32).view(1, -1, 16),
        seq_lens=torch.tensor([lengths[row] for row in rows for _ in range(HEADS)])[None].int(),
        resident_offset=torch.zeros(1, len(rows), HEADS, dtype=torch.int32),
        same_in_all_layers=True,
    )


def test_chunks_decoding_requests_and_others_of_one_step() -> None:
    """Four pages are read while decoding; of a chunk of two pages five, of one token four."""
    found = SparseReads(RULE, PageTables(small_pool()))
    assert found.chunks is not None
    assert found.chunks.num_read_fully == 16
    lengths = {"decoding": 40, "chunk": 32, "too": 40, "last": 41, "begins": 16, "behind": 60}
    queries = {"decoding": 1, "chunk": 8, "too": 8, "last": 1, "begins": 8, "behind": 3}
    ends = {"decoding": 30, "chunk": 41, "too": 41, "last": 41, "begins": 41, "behind": 50}
    prompts = {**ends, "behind": 70}  # what follows a context that it names
    names = list(lengths)
    found.register_plans({name: ReadPlan(RULE, prompts[name], ends[name]) for name in names})
    found.tables.acquire("behind")
    numbers = [np.array(list(each.values())) for each in (lengths, queries)]
    found.admit(names, *numbers)
    assert set(found.tables.slots) == {*names} - {"begins"}
    readings, rest = found.split(batch_of(found, names, list(lengths.values())))
    assert [reading.batch.rows.tolist() for reading in readings] == [[0], [3], [1, 2]]
    assert [reading.pages.num_read[0, 0].item() for reading in readings] == [4, 4, 5]
    assert [reading.choice.num_last for reading in readings] == [1, 1, 2]
    assert readings[2].batch.seq_lens.tolist() == [[20] * 4]
    assert rest is not None
    assert rest.rows.tolist() == [5]


def test_a_prompt_gets_its_page_table_once() -> None:
    found = SparseReads(RULE, PageTables(small_pool()))
    found.register_plans({"a": ReadPlan(RULE, 100, 100)})
    for end in (16, 24, 32):
        found.admit(["a"], np.array([end]), np.array([8]))
        assert (end > 16) == ("a" in found.tables.slots)
        assert found.tables.version == int(end > 16)
