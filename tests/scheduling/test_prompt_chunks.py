"""Prompt chunks: where prompts are cut that are read in part, with a plain count of pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.read_rule import PromptChunks, ReadRule


def text(local: int, top: int, prefill: int) -> str:
    return f"longcache:global=32,local={local},span=32,top={top},prefill={prefill}"


def pages_read(num_tokens: int, num_queries: int, block: int, local: int, top: int) -> int:
    """Counts the pages that a chunk reads: the first, the chunk and the last, and the spans."""
    last = max(local, num_queries)
    wanted = math.ceil((32 + last + 32 * top) / block)
    least = math.ceil(32 / block) + max(1, math.ceil(last / block)) + 1
    return min(math.ceil(num_tokens / block), max(wanted, least))


@given(
    block=st.sampled_from([16, 32, 128]),
    local=st.integers(0, 700),
    top=st.integers(1, 20),
    prefill=st.integers(1, 600),
    end=st.integers(1, 5000),
    rooms=st.lists(st.integers(0, 1500), min_size=1, max_size=8),
    min_tokens=st.sampled_from([0, 128, 1000]),
)
def test_chunk_ends_do_not_depend_on_step_sizes(
    block: int, local: int, top: int, prefill: int, end: int, rooms: list[int], min_tokens: int
) -> None:
    """Steps that read a part begin and end at multiples of a chunk, or at the prompt's end.

    Earlier steps read everything before them.
    """
    rule = ReadRule.parse(text(local, top, prefill), min_tokens)
    chunks = PromptChunks.of(rule, block)
    assert chunks is not None
    assert chunks.size == math.ceil(prefill / block) * block
    assert chunks.num_read_fully % chunks.size == 0
    start, step = 0, 0
    while start < end:
        room = rooms[step % len(rooms)] if step % 9 else chunks.size
        number = chunks.next_step(start, end, room)
        step += 1
        assert 0 <= number <= min(room, end - start)
        if number == 0:
            assert room < chunks.size
            continue
        if start < chunks.num_read_fully:
            assert start + number <= chunks.num_read_fully
            had = math.ceil((start + number) / block)
            reads_all = pages_read(start + number, chunks.size, block, local, top) == had
            assert reads_all or start + number < min_tokens
        else:
            assert start % chunks.size == 0
            assert start + number in (start + chunks.size, end)
            read = rule.of_chunk(number).read_pages(start + number, block)
            had = math.ceil((start + number) / block)
            short = start + number < min_tokens
            expected = had if short else pages_read(start + number, number, block, local, top)
            assert read == expected
        start += number


def test_first_chunk_behind_fully_read_ones_reads_a_part() -> None:
    """Uses the defaults, by which the first, the last and the spans are 6,176 tokens."""
    rule = ReadRule.parse("longcache:prefill=512")
    chunks = PromptChunks.of(rule, 32)
    assert chunks == PromptChunks(512, 6144)
    assert rule.of_chunk(512) == rule
    assert rule.of_chunk(512).read_pages(6656, 32) == 193 < 208
    assert [chunks.num_shared(n) for n in (100, 6144, 6155, 6656, 7000)] == [
        *(100, 6144, 6144, 6656, 6656)
    ]


def test_without_prefill_in_the_rule_there_are_no_chunks() -> None:
    assert PromptChunks.of(None, 32) is None
    assert PromptChunks.of(ReadRule.parse("longcache"), 32) is None
    assert PromptChunks.of(ReadRule.parse("longcache:prefill=0"), 32) is None


def test_prefill_is_refused_where_requests_choose_how_much_they_read() -> None:
    given = {"policy": "none", "read": "longcache:prefill=512", "min_request_read": 0.5}
    with pytest.raises(ConfigError, match="share prefixes only if all read alike"):
        Settings.from_dict(given)
    with pytest.raises(ConfigError, match=r"unknown option .*prefill=512"):
        ReadRule.parse("quest:0.25,prefill=512")
