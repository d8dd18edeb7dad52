"""Which pages a decode step reads: rules, bounds and choices, against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_kvcompress.attention.batch import CompressedRows, ResidentBatch
from vllm_kvcompress.attention.reading import SparseReads, summary_kind
from vllm_kvcompress.cache.page_summaries import PageSummaries, SummaryKind
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PagePool
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.page_choice import (
    Choice,
    PageLists,
    choose_pages,
    key_bounds,
    rounded_outwards,
)
from vllm_kvcompress.kernels.page_choice_numba import MAX_QUERIES, compiled
from vllm_kvcompress.scheduling.plan import ReadPlan
from vllm_kvcompress.scheduling.read_rule import ReadRule


@given(
    thousandths=st.integers(1, 1000),
    num_tokens=st.integers(1, 20_000),
    block_size=st.sampled_from([16, 32, 128]),
    min_tokens=st.integers(0, 3000),
    always=st.sampled_from(["quest:0.5", "longcache:global=40,local=100"]),
)
def test_a_fraction_is_of_the_pages(
    thousandths: int, num_tokens: int, block_size: int, min_tokens: int, always: str
) -> None:
    """The number of pages, and from how many tokens on a head reads fewer than it has."""
    rule = ReadRule.parse(always, min_tokens).reading(thousandths / 1000)
    pages = math.ceil(num_tokens / block_size)
    first, last = (32, 64) if always == "quest:0.5" else (40, 100)
    least = math.ceil(first / block_size) + math.ceil(last / block_size) + 1
    wanted = max(least, -(-pages * thousandths // 1000))
    read = pages if num_tokens < min_tokens else min(pages, wanted)
    assert rule.read_pages(num_tokens, block_size) == read
    assert (num_tokens >= rule.reads_less_from(block_size)) == (read < pages)
    for longer in (pages, pages + 7):  # a table that is wider than this head
        assert read <= rule.most_pages(longer, block_size) <= longer
    numbers = torch.tensor([pages], dtype=torch.int32)
    chosen = rule.share(block_size).of(numbers)
    assert chosen.tolist() == [-(-pages * thousandths // 1000)]


def test_tokens_are_whole_pages() -> None:
    rule = ReadRule.parse("quest:2048")
    assert rule.min_tokens == 128
    assert rule.read_pages(32_000, 32) == 64
    assert rule.share(32).of(torch.tensor([1000, 3])).tolist() == [64, 64]
    assert rule.reads_less_from(32) == 2049


def test_quest_reads_the_first_and_the_last_pages() -> None:
    rule = ReadRule.parse("quest:0.125", 0)
    assert (rule.num_first(32), rule.num_last(32), rule.num_last(16)) == (1, 2, 4)
    assert [rule.read_pages(tokens, 32) for tokens in (32, 160, 640, 1280)] == [1, 4, 4, 5]
    alone = ReadRule.parse("quest:0.125,global=0,local=0", 0)  # as the paper has it
    assert (alone.num_first(32), alone.num_last(32), alone.read_pages(640, 32)) == (0, 1, 3)


def test_longcache_reads_the_first_the_last_and_some_spans() -> None:
    rule = ReadRule.parse("longcache:local=96,top=5,score=mean", 0)
    assert (rule.num_first(32), rule.num_last(32), rule.read_pages(32_000, 32)) == (1, 3, 9)
    assert rule.score == "mean"
    assert ReadRule.parse("longcache").read_pages(32_000, 32) == 1 + 128 + 64
    assert ReadRule.parse("longcache").read_pages(32_000, 128) == math.ceil((32 + 6144) / 128)


@pytest.mark.parametrize(
    "text",
    [
        *("quest", "quest:", "quest:0", "quest:-1", "quest:1.5", "quest:nan", "quest:0.5,x=1"),
        *("quest:0.5,top=4", "quest:0.5,group=mean", "longcache:0.25", "longcache:top=0"),
        *("longcache:local=-1", "longcache:top=64,score=keys", "quest:0.5,bounds=int4"),
        *("quest:0.5,bounds=exact,score=mean", "quest:0.5,score=mean,bounds=int8"),
        *("quest:0.5,parts=3", "quest:0.5,score=bounds,parts=2", "quest:0.5,bounds=int8,parts=2"),
    ],
)
def test_what_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"quest:0\.25|fraction|goes with score="):
        ReadRule.parse(text)


def test_pages_are_ranked_by_bounds_unless_asked() -> None:
    found = {
        text: summary_kind(ReadRule.parse(f"quest:0.25{text}"))
        for text in ("", ",score=mean", ",parts=4", ",bounds=int8")
    }
    expected = [SummaryKind(), SummaryKind(2), SummaryKind(4), SummaryKind(rounded=True)]
    assert list(found.values()) == expected


def reads_of_requests(**limits: Any) -> Settings:
    return Settings.from_dict({"policy": "none", "read": "quest:0.25,score=mean", **limits})


def test_requests_choose_within_the_limit() -> None:
    found = reads_of_requests(min_request_read=0.125)
    assert Settings.from_dict(found.to_dict()) == found
    for read in (0.125, 0.5, 1.0):
        rule = found.request_read_rule(read)
        assert rule == ReadRule.parse(f"quest:{read},score=mean")
    assert found.request_read_rule(None) == found.read_rule
    with pytest.raises(ConfigError, match=r"allows 0\.125 to 1"):
        found.request_read_rule(0.1)


@pytest.mark.parametrize("settings", [{"read": None}, {}])
def test_requests_choose_only_where_the_operator_says(settings: dict[str, Any]) -> None:
    found = reads_of_requests(**settings)
    with pytest.raises(ConfigError, match=r"kv_read 0\.5: this server lets no request choose"):
        found.request_read_rule(0.5)


@pytest.mark.parametrize("limit", [{"min_request_read": bad} for bad in (0, 1.5, "x", True)])
def test_limits_are_fractions(limit: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"should be (a valid number|greater than 0|less than or equal to 1), found",
    ):
        reads_of_requests(**limit)
    with pytest.raises(ConfigError, match="expected read beside it"):
        Settings.from_dict({"policy": "snapkv", "min_request_read": 0.5})


def test_settings_carry_it() -> None:
    given = {"policy": "none", "read": "quest:0.25", "read_min_tokens": 512}
    found = Settings.from_dict(given)
    assert found.acts
    assert not found.may_compress
    assert Settings.from_dict(found.to_dict()) == found
    assert found.read_rule == ReadRule.parse("quest:0.25", 512)
    with pytest.raises(ConfigError, match="expected read beside it"):
        Settings.from_dict({"policy": "snapkv", "read_min_tokens": 512})


HEADS, SIZE, HEAD_SIZE = 2, 4, 3


def small_pool(num_pages: int = 40) -> InterleavedPagePool:
    return InterleavedPagePool(
        pages=torch.randn(num_pages, 2 * SIZE * HEAD_SIZE),
        pages_per_block=HEADS,
        layer_offsets=torch.zeros(1, dtype=torch.int64),
        num_heads=HEADS,
        block_size=SIZE,
        head_size=HEAD_SIZE,
    )


KINDS = {
    "exact": SummaryKind(),
    "int8": SummaryKind(rounded=True),
    **{f"means:{parts}": SummaryKind(parts) for parts in (1, 2, 4)},
}


def products(keys: list[list[float]], query: list[float], score: str) -> float:
    """The bound on a page's products with a query, or their highest mean over a part."""
    if score.startswith("means"):
        every = product_with_each(keys, query)
        size = len(every) // int(score[-1])
        return max(sum(every[at : at + size]) / size for at in range(0, len(every), size))
    step = 0.0 if score == "exact" else scale_of(keys)
    total = 0.0
    for at, q in enumerate(query):
        low, high = min(key[at] for key in keys), max(key[at] for key in keys)
        if step:
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        total += max(q * low, q * high)
    return total


def product_with_each(keys: list[list[float]], query: list[float]) -> list[float]:
    return [sum(q * k for q, k in zip(query, key, strict=True)) for key in keys]


def scale_of(keys: list[list[float]]) -> float:
    """The power of two of which less than 127 are the largest element of a page."""
    step, largest = 2.0**-130, max(abs(element) for key in keys for element in key)
    while step * 127 <= largest:
        step *= 2
    return step


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 127.0, 3e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outlier=st.booleans(),
)
def test_bounds_in_8_bits_are_rounded_outwards(
    seed: int, magnitude: float, dtype: torch.dtype, outlier: bool
) -> None:
    """Never within the keys, so no product is above its bound; and by less than a step beyond."""
    torch.manual_seed(seed)
    keys = (torch.randn(5, SIZE, 8) * magnitude).to(dtype)
    keys[0] = 0
    if outlier:
        keys[:, 1, 2] *= 50
    codes, scales = rounded_outwards(key_bounds(keys))
    assert codes.dtype == torch.int8
    query = torch.randn(8, dtype=torch.float64)
    for page, (numbers, scale) in enumerate(zip(codes.tolist(), scales.tolist(), strict=True)):
        bound, own = 0.0, keys[page].tolist()
        for at, q in enumerate(query.tolist()):
            low, high = numbers[at] * scale, numbers[8 + at] * scale
            column = [key[at] for key in own]
            assert min(column) - scale < low <= min(column)
            assert max(column) <= high < max(column) + scale
            bound += max(q * low, q * high)
        highest = max(product_with_each(own, query.tolist()))
        assert bound >= highest or bound == pytest.approx(highest, rel=1e-12)
        assert page == 0 or scale == scale_of(own)


def chosen(pool: PagePool, queries: Tensor, pages: PageLists, choice: Choice, score: str) -> Tensor:
    """By summaries of a pool of 40 pages."""
    summaries = PageSummaries(pool, KINDS[score])
    summaries.fill_blocks(0, torch.arange(20))
    choice = replace(choice, num_means=KINDS[score].num_means)
    return choose_pages(queries, summaries.vectors, pages, choice, summaries.scales)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), score=st.sampled_from(list(KINDS)), equal=st.booleans())
def test_pages_with_the_highest_scores_are_read(
    data: st.DataObject, score: str, equal: bool
) -> None:
    """Scores, choice and order against loops over pages, queries and elements.

    Of equally good pages, as where queries are zero, the later ones are read.
    """
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    pool = small_pool()
    counts = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    width = max(counts) + data.draw(st.integers(0, 3))
    table = torch.stack([torch.randperm(40)[:width] for _ in counts]).to(torch.int32)
    first, last = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    read = [data.draw(st.integers(min(first + last, count), count)) for count in counts]
    queries = torch.zeros if equal else torch.randn
    asked = queries(len(counts), 2, HEAD_SIZE)
    most = data.draw(st.integers(max(read), width))
    pages = PageLists(table, torch.tensor(counts), torch.tensor(read))
    found = chosen(pool, asked, pages, Choice(most, first, last), score)
    assert found.shape == (len(counts), most)
    for row, (count, number) in enumerate(zip(counts, read, strict=True)):
        scores = []
        for index, page in enumerate(table[row, :count].tolist()):
            keys = pool.keys(torch.tensor(page), 0).tolist()
            by_query = [products(keys, query, score) for query in asked[row].tolist()]
            scores.append(math.inf if index < first or index >= count - last else max(by_query))
        best = sorted(range(count), key=lambda page: (scores[page], page))[count - number :]
        assert found[row, :number].tolist() == [int(table[row, page]) for page in sorted(best)]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(["bfloat16", "float32", "float16", "int8"]),
    num_means=st.sampled_from([0, 1, 2, 4]),
    group=st.sampled_from([1, 3, MAX_QUERIES + 1]),
)
def test_what_is_compiled_for_cpus_is_the_twin_s(
    data: st.DataObject, kind: str, num_means: int, group: int
) -> None:
    """In whole numbers, so that sums are exact and scores often equal, zeros of both signs too."""
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    rounded, dtype = kind == "int8", getattr(torch, kind)
    num_means = 0 if rounded else num_means
    counts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    width, size = max(counts) + data.draw(st.integers(0, 3)), data.draw(st.sampled_from([4, 32]))
    first, last = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2))
    read = [data.draw(st.integers(min(first + last, count), count)) for count in counts]
    queries = torch.randint(-1, 2, (len(counts), group, size)).to(torch.float32)
    queries = torch.where(torch.rand(queries.shape) < 0.1, -0.0, queries)
    summaries = torch.randint(-2, 3, (50, (num_means or 2) * size)).to(dtype)
    scales = torch.exp2(torch.randint(-3, 4, (50,)).float()) if rounded else None
    table = torch.randint(0, 50, (len(counts), width + 3), dtype=torch.int32)[:, 1 : width + 1]
    pages = PageLists(table, torch.tensor(counts), torch.tensor(read))
    choice = Choice(max(read), first, last, num_means)
    asked = queries.to(torch.bfloat16 if rounded else dtype)
    found = choose_pages(asked, summaries, pages, choice, scales)
    exact = summaries if rounded else summaries.float()
    expected = twin(choose_pages)(queries, exact, pages, choice, scales)
    for row, number in enumerate(read):
        assert found[row, :number].tolist() == expected[row, :number].tolist()


def test_it_is_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose file system cannot be written numba has no place for its files."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])

    def twice(number: int) -> int:
        return 2 * number

    assert compiled()(twice)(3) == 6


def readers(rule: str = "quest:0.25,global=0,local=1") -> SparseReads:
    return SparseReads(ReadRule.parse(rule, 0), PageTables(small_pool()))


def own(found: SparseReads, part: float) -> ReadPlan:
    return ReadPlan(found.rule.reading(part), 2)


def test_requests_are_looked_up_once() -> None:
    """A page table from the length on at which a request reads less; never for what it asks for."""
    found, names = readers(), ["a", "b", "c"]
    found.register_plans(
        {"b": own(found, 1.0), "c": own(found, 0.75), "a": ReadPlan(found.rule, 9)}
    )
    queries, size = np.ones(3, dtype=np.int64), SIZE
    found.admit(names, np.array([2 * size, 90, 3 * size]), queries)
    assert set(found.tables.slots) == set()
    found.admit(names, np.array([2 * size + 1, 90, 3 * size + 1]), np.array([1, 1, 2]))
    assert set(found.tables.slots) == set()  # a's last prompt token, and two of c's
    found.admit(names, np.array([2 * size + 2, 90, 3 * size + 1]), np.array([1, 1, 2]))
    assert set(found.tables.slots) == {"a"}
    looked_up = found._starts
    found.admit(names, np.array([2 * size + 3, 91, 3 * size + 2]), queries)
    assert set(found.tables.slots) == {"a", "c"}
    assert found._starts is looked_up
    found.forget("b")
    found.tables.release("a")
    found.admit(["b", "a"], np.array([99, 99]), queries[:2])
    assert set(found.tables.slots) == {"a", "b", "c"}


def test_requests_of_one_step_read_different_parts() -> None:
    """One request reads a quarter of 12 pages, one all and one a half, some of 5 as many."""
    found = readers()
    found.register_plans({"b": own(found, 1.0), "c": own(found, 0.5)})
    lengths = torch.tensor([[46, 46, 17, 17, 46, 18]], dtype=torch.int32)
    batch = ResidentBatch(
        **vars(CompressedRows.of(np.arange(3), torch.device("cpu"))),
        page_table=torch.arange(6 * 12, dtype=torch.int32).view(1, 6, 12),
        seq_lens=lengths,
        resident_offset=torch.zeros(1, 3, 2, dtype=torch.int32),
        same_in_all_layers=False,
    )
    found.admit(["a", "b", "c"], np.full(3, 46), np.ones(3, dtype=np.int64))
    reading = found.reading(batch)
    assert reading.pages.num_read.tolist() == [[3, 3, 5, 5, 6, 3]]
    assert reading.choice.most == 12
    dropped = torch.tensor([[9, 9, 0, 0, 6, 2]])
    assert torch.equal(reading.batch.seq_lens, lengths - dropped * SIZE)


def test_summaries_take_their_share_of_memory() -> None:
    """A page of 32 tokens has 64 vectors; its summary is as many as it has parts, or two, or as
    many bytes and a scale."""
    numbers = {"exact": 256, "int8": 132, "means:1": 128, "means:4": 512}
    for size in (16, 32):
        for score, own in numbers.items():
            both = 1000 * (2 * size * 64 * 2 + own)
            share = KINDS[score].share(both, 2 * size * 64 * 2, 64, torch.bfloat16)
            assert share == 1000 * own
    for kind in KINDS.values():
        summaries = PageSummaries(small_pool(), kind)
        tensors = [each for each in (summaries.vectors, summaries.scales) if each is not None]
        taken = sum(each.numel() * each.element_size() for each in tensors)
        total = small_pool().pages.numel() * 4 + taken
        share = kind.share(total, 2 * SIZE * HEAD_SIZE * 4, HEAD_SIZE, torch.float32)
        assert share == taken


@pytest.mark.parametrize("kind", KINDS.values())
def test_cache_groups_with_the_same_pages_share_their_summaries(kind: SummaryKind) -> None:
    pool, other = small_pool(), small_pool()
    same = replace(pool, layer_offsets=pool.layer_offsets + 1, pages=pool.pages.view_as(pool.pages))
    own = PageSummaries(pool, kind)
    shared = PageSummaries(same, kind, [PageSummaries(other, kind), own])
    assert shared.vectors is own.vectors
    assert shared.scales is own.scales
    assert PageSummaries(other, kind, [own]).vectors is not own.vectors
