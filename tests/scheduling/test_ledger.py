"""Ledger and rule: properties, and a plain loop as oracle for event positions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_kvcompress.scheduling.ledger import (
    SKIP_NOTHING_TO_FREE,
    SKIP_PROTECTED,
    SKIP_SHORT,
    Decision,
    PreparationLedger,
    RequestLedger,
)
from vllm_kvcompress.scheduling.rule import (
    TRIGGER_CEILING,
    TRIGGER_PREPARE,
    TRIGGER_PRESSURE,
    CompressionRule,
)

BLOCK = 16

rules = st.builds(
    CompressionRule,
    block_size=st.just(BLOCK),
    fraction=st.floats(0.05, 0.9),
    at_prompt_end=st.booleans(),
    chunk_tokens=st.sampled_from([None, BLOCK, 4 * BLOCK]),
    decode_tokens=st.sampled_from([None, 1, 5, 3 * BLOCK]),
    min_tokens=st.integers(0, 100),
    window_size=st.sampled_from([0, 1, 32]),
    min_window=st.sampled_from([None, 1, 8, 40]),
    pressure_mark=st.sampled_from([None, 0.9]),
    ceiling_blocks=st.sampled_from([None, 2, 5, 16]),
)


def under_pressure(rule: CompressionRule, prompt: int, position: int) -> bool:
    """Whether a request is selected, at some positions behind the prompt."""
    return rule.pressure_mark is not None and position > prompt and position % 7 == 3


def positions_by_hand(rule: CompressionRule, prompt: int, end: int) -> list[int]:
    """Returns every position up to `end` at which some trigger fires, token by token."""
    positions = []
    for position in range(1, end + 1):
        fires = False
        if position == prompt and (rule.at_prompt_end or rule.chunk_tokens):
            fires = True
        if position < prompt and rule.chunk_tokens and position % rule.chunk_tokens == 0:
            fires = True
        stride = rule.decode_tokens or rule.chunk_tokens
        if position > prompt and stride and (position - prompt) % stride == 0:
            fires = True
        if fires:
            positions.append(position)
    return positions


@given(rule=rules, prompt=st.integers(1, 300))
def test_positions_match_a_plain_loop(rule: CompressionRule, prompt: int) -> None:
    expected = positions_by_hand(rule, prompt, prompt + 100)
    positions, position = [], rule.next_position(prompt, 0)
    while position is not None and position <= prompt + 100:
        positions.append(position)
        position = rule.next_position(prompt, position)
    assert positions == expected
    assert [p for p in range(1, prompt + 101) if rule.is_position(prompt, p)] == expected


@example(
    rule=CompressionRule(BLOCK, fraction=0.05, chunk_tokens=BLOCK, min_tokens=100),
    prompt=1,
    generated=120,
)
@given(rule=rules, prompt=st.integers(1, 2000), generated=st.integers(0, 300))
def test_a_request_never_holds_more_than_the_peak(
    rule: CompressionRule, prompt: int, generated: int
) -> None:
    """Walks a request through its events in the scheduler's chunks."""
    ledger = RequestLedger(prompt, rule)
    end, computed = prompt + generated, 0
    peak = rule.peak_blocks(end)
    while computed < end:
        limit = computed + 4 * BLOCK if computed < prompt else computed + 1
        position = ledger.next_position(computed)
        step_end = min(limit, end, position if position is not None else limit)
        if computed < prompt:
            step_end = min(step_end, prompt)
        held = ledger.resident_blocks + math.ceil(step_end / BLOCK) - ledger.compressed_blocks
        decision = ledger.decide(step_end, under_pressure(rule, prompt, step_end))
        if decision is not None and not decision.skipped:
            sources = held - (1 if step_end % BLOCK else 0)
            assert decision.num_kept_blocks < sources
            held += decision.num_kept_blocks
            ledger.commit(step_end, decision.num_kept_blocks)
        assert held <= peak
        computed = step_end
    assert ledger.resident_tokens(end) <= end


@given(
    rule=rules,
    ceiling=st.integers(2, 20),
    prompt=st.integers(1, 900),
    steps=st.lists(st.integers(1, 120), min_size=1),
    everything=st.booleans(),
)
def test_no_request_ever_holds_more_than_its_ceiling(
    rule: CompressionRule, ceiling: int, prompt: int, steps: list[int], everything: bool
) -> None:
    """Counts held tokens by hand; with a budget of everything those below the ceiling are left."""
    if everything:
        rule = CompressionRule(BLOCK, fraction=1.0, at_prompt_end=False, min_tokens=rule.min_tokens)
    ledger = RequestLedger(prompt, replace(rule, ceiling_blocks=ceiling))
    computed, held, most, num_events = 0, 0, 0, 0
    for step in itertools.chain(steps, itertools.repeat(1, 400)):
        event = ledger.next_position(computed)
        assert event is not None
        end = min(event, computed + (step if computed < prompt else 1))
        held += end - computed
        decision = ledger.decide(end, under_pressure(ledger.rule, prompt, end))
        assert decision is None or end == event or decision.trigger == TRIGGER_PRESSURE
        if decision is not None and not decision.skipped:
            num_events += 1
            full_before, partial = held // BLOCK, end % BLOCK
            held = decision.num_kept_blocks * BLOCK + partial
            assert decision.num_kept_blocks < full_before
            ledger.commit(end, decision.num_kept_blocks)
        computed, most = end, max(most, held)
        assert held <= ceiling * BLOCK
        assert ledger.resident_tokens(computed) == held
    if everything:
        assert (num_events == 0) == (computed < ceiling * BLOCK)
        assert most == min(computed, ceiling * BLOCK - 1)


@given(
    rule=rules,
    layer_dependent=st.booleans(),
    prompt=st.integers(1, 400),
    answer=st.integers(1, 300),
    chunk=st.integers(1, 120),
)
def test_no_request_comes_to_hold_more_than_is_reserved(
    rule: CompressionRule, layer_dependent: bool, prompt: int, answer: int, chunk: int
) -> None:
    """Counts by hand what an answer holds, and what events take, up to the last token."""
    rule = replace(rule, pressure_mark=None, layer_dependent=layer_dependent)
    ledger = RequestLedger(prompt, rule, num_prompt_tokens=prompt, most_tokens=prompt + answer)
    computed, blocks = 0, 0
    said: list[tuple[int, int]] = []
    fresh: list[tuple[int, int]] = []
    while computed < prompt + answer:
        said.append((computed, ledger.most_blocks()))
        fresh.append((computed, ledger.fresh_blocks()))
        event = ledger.next_position(computed)
        end = min(computed + chunk, prompt) if computed < prompt else computed + 1
        end = end if event is None else min(event, end)
        blocks += math.ceil(end / BLOCK) - math.ceil(computed / BLOCK)
        if computed >= prompt:
            assert all(blocks <= most for at, most in said if at >= prompt)
        decision = ledger.decide(end)
        if decision is not None and not decision.skipped:
            kept, former = decision.num_kept_blocks, ledger.resident_blocks
            if layer_dependent or kept != former:
                assert all(kept <= most for _, most in fresh)
            ledger.commit(end, kept)
            blocks = kept + (end % BLOCK > 0)
        computed = end


@pytest.mark.parametrize(
    ("ceiling", "kept"), [(2, 1), (8, 7), (15, 14), (16, 14), (64, 56), (100, 88)]
)
def test_an_event_at_the_ceiling_makes_room_for_an_eighth(ceiling: int, kept: int) -> None:
    rule = CompressionRule(BLOCK, fraction=1.0, at_prompt_end=False, ceiling_blocks=ceiling)
    ledger = RequestLedger(1000 * BLOCK, rule)
    assert ledger.decide(ceiling * BLOCK - 1) is None
    assert ledger.decide(ceiling * BLOCK) == Decision(TRIGGER_CEILING, kept)
    ledger.commit(ceiling * BLOCK, kept)
    assert ledger.next_position(ceiling * BLOCK) == (2 * ceiling - kept) * BLOCK
    assert rule.peak_blocks(1000 * BLOCK) == 2 * ceiling + 1
    assert rule.held_blocks(1000 * BLOCK) == ceiling


def test_a_long_prompt_is_compressed_once_more_at_its_end() -> None:
    """There its last queries say what to keep; a prompt below the ceiling is left alone."""
    rule = CompressionRule(BLOCK, fraction=1.0, at_prompt_end=False, ceiling_blocks=16)
    prompt = 17 * BLOCK + 5
    ledger = RequestLedger(prompt, replace(rule, window_size=8))
    ledger.commit(16 * BLOCK, 14)
    assert ledger.next_position(16 * BLOCK) == prompt
    assert ledger.decide(prompt) == Decision(TRIGGER_CEILING, 14)
    assert RequestLedger(15 * BLOCK, rule).next_position(0) == 16 * BLOCK


@example(  # every chunk leaves less than the ceiling
    rule=CompressionRule(
        BLOCK, fraction=0.25, at_prompt_end=False, chunk_tokens=BLOCK, ceiling_blocks=16
    ),
    prompt=257,
    pool=1,
)
@given(rule=rules, prompt=st.integers(1, 2000), pool=st.integers(1, 500))
def test_concurrency_is_the_number_of_requests_that_fit(
    rule: CompressionRule, prompt: int, pool: int
) -> None:
    """One request is at its peak, the others are between events."""
    count = math.floor(rule.concurrency(prompt, pool))
    assert rule.held_blocks(prompt) <= rule.admission_blocks(prompt)
    if not count:
        assert pool < rule.admission_blocks(prompt)
        return
    needed = (count - 1) * rule.held_blocks(prompt) + rule.admission_blocks(prompt)
    assert needed <= pool < needed + rule.held_blocks(prompt)


def fewest_queries(rule: CompressionRule) -> int:
    """Returns how many queries a prefix-cache hit has to leave before the first event."""
    if rule.min_window is None or rule.min_window > rule.window_size:
        return rule.window_size
    return rule.min_window


@given(rule=rules, prompt=st.integers(1, 600), cached=st.integers(0, 600))
def test_a_prefix_hit_is_cut_to_leave_the_fewest_queries_and_no_further(
    rule: CompressionRule, prompt: int, cached: int
) -> None:
    cached = min(cached, prompt - 1)
    hit = min(cached, rule.max_prefix_hit(prompt))
    assert 0 <= rule.max_prefix_hit(prompt) < prompt
    first = rule.first_effective_position(prompt)
    if first is None and rule.pressure_mark is not None:
        first = prompt
    if first is None:
        assert hit == cached
        return
    needed = max(1, fewest_queries(rule))
    if first - cached >= needed:  # enough tokens are new
        assert hit == cached
    else:
        assert hit == max(0, first - needed)


@given(rule=rules, prompt=st.integers(1, 600), cached=st.integers(0, 600))
def test_first_event_observes_the_new_tokens_up_to_the_window(
    rule: CompressionRule, prompt: int, cached: int
) -> None:
    rule = replace(rule, chunk_tokens=None, at_prompt_end=True)
    hit = min(cached, rule.max_prefix_hit(prompt))
    ledger = RequestLedger(prompt, rule, num_hit_tokens=hit)
    window = ledger.observed_window(prompt)
    assert window == min(rule.window_size, prompt - hit)
    if rule.first_effective_position(prompt) is not None:
        assert window >= min(prompt, fewest_queries(rule))


@given(rule=rules, prompt=st.integers(1, 600), behind=st.integers(1, 100))
def test_context_is_compressed_by_queries_before_its_end(
    rule: CompressionRule, prompt: int, behind: int
) -> None:
    """A request that names its context computes the context's last queries, whatever follows."""
    rule = replace(rule, chunk_tokens=None, at_prompt_end=True)
    ledger = RequestLedger(prompt, rule, num_prompt_tokens=prompt + behind)
    assert ledger.max_prefix_hit(prompt + behind) == rule.max_prefix_hit(prompt) < prompt
    ledger.num_hit_tokens = ledger.max_prefix_hit(prompt + behind)
    expected = min(rule.window_size, prompt - ledger.num_hit_tokens)
    assert ledger.observed_window(prompt) == expected


@example(  # at the prompt's end nothing is to be freed
    rule=CompressionRule(
        BLOCK, fraction=1.0, at_prompt_end=False, ceiling_blocks=5, window_size=32
    ),
    prompt=90,
    start=0,
    step=99,
)
@given(rule=rules, prompt=st.integers(1, 400), start=st.integers(0, 400), step=st.integers(1, 99))
def test_observed_queries_cover_every_window(
    rule: CompressionRule, prompt: int, start: int, step: int
) -> None:
    """For any chunks, the queries that an event observes have been recorded before."""
    computed = min(start, rule.max_prefix_hit(prompt))
    ledger = RequestLedger(prompt, rule, num_hit_tokens=computed)
    recorded: set[int] = set()
    while computed < prompt + 60:
        position = ledger.next_position(computed)
        end = min(computed + step, position if position is not None else computed + step)
        seen = ledger.observation(computed, end)
        if seen is not None:
            assert seen.position == computed + seen.offset
            recorded |= set(range(seen.position, seen.position + seen.num_tokens))
        decision = ledger.decide(end, under_pressure(rule, prompt, end))
        if decision is not None and not decision.skipped:
            window = ledger.observed_window(end)
            assert set(range(end - window, end)) <= recorded
            ledger.commit(end, decision.num_kept_blocks)
        computed = end


@pytest.mark.parametrize(
    ("prompt", "reason"), [(40, SKIP_SHORT), (63, SKIP_SHORT), (70, None), (64, None)]
)
def test_prompts_below_min_tokens_are_not_compressed(prompt: int, reason: str | None) -> None:
    rule = CompressionRule(BLOCK, fraction=0.5, min_tokens=64)
    decision = RequestLedger(prompt, rule).decide(prompt)
    assert decision is not None
    assert decision.skipped == reason


def test_a_budget_above_the_prompt_frees_nothing() -> None:
    rule = CompressionRule(BLOCK, tokens=1000)
    decision = RequestLedger(500, rule).decide(500)
    assert decision is not None
    assert decision.skipped == SKIP_NOTHING_TO_FREE
    assert rule.max_prefix_hit(500) == 499


@pytest.mark.parametrize(("blocks", "kept"), [(1, 1), (4, 1), (5, 2), (8, 2), (100, 25), (101, 26)])
def test_a_quarter_is_rounded_up_to_whole_blocks(blocks: int, kept: int) -> None:
    rule = CompressionRule(BLOCK, fraction=0.25)
    assert rule.target_blocks(blocks * BLOCK + 3, blocks * BLOCK + 3) == kept


def test_target_is_at_least_least_blocks() -> None:
    rule = CompressionRule(block_size=32, fraction=0.25, least_blocks=5)
    assert rule.target_blocks(32 * 8, 32 * 8) == 5
    assert rule.target_blocks(32 * 40, 32 * 40) == 10


@pytest.mark.parametrize(("blocks", "skipped"), [(16, None), (12, SKIP_PROTECTED)])
def test_events_without_room_for_what_every_head_has_to_keep_are_left_out(
    blocks: int, skipped: str | None
) -> None:
    """A quarter of the prompt is 4 or 3 blocks, for 100 tokens."""
    rule = CompressionRule(block_size=32, fraction=0.25, num_certain=100)
    decision = RequestLedger(blocks * 32, rule).decide(blocks * 32)
    assert decision is not None
    assert decision.skipped == skipped


def test_inexact_binary_fractions_round_like_decimals() -> None:
    rule = CompressionRule(BLOCK, fraction=0.1)
    assert rule.target_blocks(30 * BLOCK, 30 * BLOCK) == 3


@given(
    rule=rules, prompt=st.integers(2, 300), position=st.integers(1, 299), more=st.integers(0, 200)
)
def test_kept_state_is_used_up_to_the_queries_of_the_next_event(
    rule: CompressionRule, prompt: int, position: int, more: int
) -> None:
    rule = replace(rule, ceiling_blocks=None)
    position = min(position, prompt - 1)
    num_tokens = min(position + more, prompt - 1)
    events = positions_by_hand(rule, prompt, 2 * prompt + 100)
    if rule.pressure_mark is not None:
        events = sorted({*events, prompt})

    def leaves_the_queries(start: int) -> bool:
        first = next((event for event in events if event > start), None)
        if first is None:
            return True
        oldest = position
        if first > prompt and rule.pressure_mark is None:
            oldest = prompt
        needed = fewest_queries(rule)
        queries = range(oldest, first)[-needed:] if needed else ()
        return all(query >= start for query in queries)

    expected = max(filter(leaves_the_queries, range(position, num_tokens + 1)), default=0)
    ledger = RequestLedger(prompt, rule, num_prompt_tokens=prompt)
    assert ledger.usable_tokens(position, 1, num_tokens) == expected


@given(rule=rules, blocks=st.integers(1, 40), behind=st.integers(1, 700))
def test_preparation_keeps_as_many_blocks_as_a_named_context(
    rule: CompressionRule, blocks: int, behind: int
) -> None:
    """The event is at the prompt's end, and leaves as many blocks of the context alone."""
    rule = replace(rule, ceiling_blocks=None)  # with which no context is prepared
    context = blocks * BLOCK
    ordinary = RequestLedger(context, replace(rule, at_prompt_end=True, chunk_tokens=None))
    expected = ordinary.decide(context)
    ledger = PreparationLedger.of(rule, "any", context, context + behind)
    assert ledger.max_prefix_hit(context + behind) == min(context, context + behind - 2) - 1
    for position in range(1, context + behind + 50):
        decision = ledger.decide(position, under_pressure(rule, context, position))
        assert (decision is not None) == (position == context + behind)
        assert ledger.observation(position - 1, position) is None
    decision = ledger.decide(context + behind)
    assert expected is not None
    assert decision == replace(expected, trigger=TRIGGER_PREPARE)
    assert ledger.end_of_event(context + behind) == context
    if not decision.skipped:
        ledger.commit(context + behind, decision.num_kept_blocks)
        assert (ledger.last_position, ledger.compressed_blocks) == (context, blocks)
        held = decision.num_kept_blocks * BLOCK + behind
        assert ledger.resident_tokens(context + behind) == held


@given(
    blocks=st.integers(1, 4),
    behind=st.integers(1, 50),
    rooms=st.lists(st.integers(3, 60), min_size=1),
)
def test_scoring_chunks_have_at_least_two_tokens(
    blocks: int, behind: int, rooms: list[int]
) -> None:
    """A chunk ends where the next ones begin to score the context."""
    context, end = blocks * BLOCK, blocks * BLOCK + behind
    ledger = PreparationLedger.of(CompressionRule(BLOCK, 0.5), "any", context, end)
    assert context - 1 <= ledger.scored_from <= context
    starts = [0]
    for room in itertools.cycle(rooms):
        num_tokens = ledger.chunk(starts[-1], min(room, end - starts[-1]))
        assert 0 < num_tokens <= room
        assert num_tokens > 1 or starts[-1] < ledger.scored_from
        starts.append(starts[-1] + num_tokens)
        if starts[-1] == end:
            break
    assert ledger.scored_from in starts


@given(
    rule=rules,
    prompt=st.integers(1, 200),
    asked=st.lists(st.tuples(st.integers(0, 600), st.sampled_from([0, 1, 5])), max_size=20),
)
def test_positions_do_not_depend_on_what_was_asked_before(
    rule: CompressionRule, prompt: int, asked: list[tuple[int, int]]
) -> None:
    """Between events, at every one of which something is kept, and behind the end of reasoning."""
    ledger = RequestLedger(prompt, replace(rule, after_reasoning=0.5), num_prompt_tokens=prompt)
    for number, (after, kept) in enumerate(asked):
        if kept:
            ledger.commit(max(after, ledger.last_position), kept)
        if number == 10:
            ledger.end_reasoning(prompt + 30)
        assert ledger.next_position(after) == replace(ledger).next_position(after)


def test_a_token_is_an_event_where_memory_is_short() -> None:
    """Between the rule's own positions nothing happens to requests that were not selected."""
    ledger = RequestLedger(8 * BLOCK, CompressionRule(BLOCK, fraction=0.25))
    ledger.commit(8 * BLOCK, 8)
    assert ledger.decide(10 * BLOCK + 1) is None
    decision = ledger.decide(10 * BLOCK + 1, under_pressure=True)
    assert decision is not None
    assert decision.trigger == TRIGGER_PRESSURE
