"""Which pages a decode step reads: rules, bounds and choices, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.cache.page_bounds import PageBounds, bytes_beside
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.page_choice import choose_pages
from vllm_kvcompress.scheduling.read_rule import ReadRule


@given(
    thousandths=st.integers(1, 1000),
    num_tokens=st.integers(1, 20_000),
    block_size=st.sampled_from([16, 32, 128]),
    min_tokens=st.integers(0, 3000),
)
def test_a_fraction_is_of_the_pages(
    thousandths: int, num_tokens: int, block_size: int, min_tokens: int
) -> None:
    rule = ReadRule.parse(f"quest:{thousandths / 1000}", min_tokens)
    pages = math.ceil(num_tokens / block_size)
    wanted = max(2, -(-pages * thousandths // 1000))
    assert max(2, rule.chosen_pages(pages, block_size)) == wanted
    assert rule.reads_less(num_tokens, block_size) == (num_tokens >= min_tokens and wanted < pages)
    read = wanted if rule.reads_less(num_tokens, block_size) else pages
    for longer in (pages, pages + 7):  # a table that is wider than this head
        assert read <= rule.most_pages(longer, block_size) <= longer
    numbers = torch.tensor([pages], dtype=torch.int32)
    assert rule.chosen_pages(numbers, block_size).tolist() == [-(-pages * thousandths // 1000)]


def test_tokens_are_whole_pages() -> None:
    rule = ReadRule.parse("quest:2048,group=mean")
    assert (rule.group, rule.min_tokens) == ("mean", 128)
    assert rule.chosen_pages(1000, 32) == 64
    assert rule.chosen_pages(torch.tensor([1000, 3]), 32).tolist() == [64, 64]
    assert not rule.reads_less(2048, 32)
    assert rule.reads_less(2049, 32)


@pytest.mark.parametrize(
    "text", ["quest", "quest:", "quest:0", "quest:-1", "quest:1.5", "quest:nan", "quest:0.5,x=1"]
)
def test_what_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="quest"):
        ReadRule.parse(text)


def test_settings_carry_it() -> None:
    given = {"policy": "none", "read": "quest:0.25", "read_min_tokens": 512}
    found = Settings.from_dict(given)
    assert found.acts
    assert not found.may_compress
    assert Settings.from_dict(found.to_dict()) == found
    assert found.read_rule == ReadRule.parse("quest:0.25", 512)
    with pytest.raises(ConfigError, match="beside read"):
        Settings.from_dict({"policy": "snapkv", "read_min_tokens": 512})


@settings(max_examples=60, deadline=None)
@given(data=st.data(), group=st.sampled_from(["max", "mean"]))
def test_pages_with_the_highest_bounds_are_read(data: st.DataObject, group: str) -> None:
    """Bounds, choice and order against loops over pages, queries and elements."""
    num_heads, size, head_size, num_queries = 2, 4, 3, 2
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    pool = InterleavedPagePool(
        pages=torch.randn(40, 2 * size * head_size),
        pages_per_block=num_heads,
        layer_offsets=torch.zeros(1, dtype=torch.int64),
        num_heads=num_heads,
        block_size=size,
        head_size=head_size,
    )
    bounds = PageBounds(pool)
    bounds.fill_blocks(0, torch.arange(20))
    counts = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    width = max(counts) + data.draw(st.integers(0, 3))
    table = torch.stack([torch.randperm(40)[:width] for _ in counts]).to(torch.int32)
    read = [data.draw(st.integers(1, count)) for count in counts]
    queries = torch.randn(len(counts), num_queries, head_size)
    most = data.draw(st.integers(max(read), width))
    found = choose_pages(
        queries, bounds.bounds, table, torch.tensor(counts), torch.tensor(read), most, group
    )
    assert found.shape == (len(counts), most)
    for row, (count, number) in enumerate(zip(counts, read, strict=True)):
        scores = []
        for page in table[row, : count - 1].tolist():
            keys = pool.pages[page].view(size, 2 * head_size)[:, :head_size]
            by_query = []
            for query in queries[row].tolist():
                total = 0.0
                for element, number_of in enumerate(query):
                    total += max(number_of * float(key[element]) for key in keys)
                by_query.append(total)
            scores.append(max(by_query) if group == "max" else sum(by_query) / num_queries)
        best = sorted(range(count - 1), key=lambda page: -scores[page])[: number - 1]
        expected = [int(table[row, page]) for page in (*sorted(best), count - 1)]
        assert found[row, :number].tolist() == expected


def test_bounds_take_their_share_of_memory() -> None:
    """A page of 32 tokens has 64 vectors, its bounds are two."""
    whole = 33 * 1000
    assert bytes_beside(whole, 32) == 1000
