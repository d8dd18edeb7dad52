"""Budgets where a block of vLLM's is several blocks of attention kernels, counted by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.scheduling.ledger import SKIP_NOTHING_TO_FREE, Decision, RequestLedger
from vllm_kvcompress.scheduling.plan import kernel_blocks
from vllm_kvcompress.scheduling.rule import CompressionRule, PolicyDemand

PART = 16

rules = st.builds(
    lambda split, budget, chunk, **more: CompressionRule(
        PART,
        split=split,
        chunk_tokens=chunk and chunk * split * PART,
        fraction=budget if budget < 1 else None,
        tokens=None if budget < 1 else int(budget),
        **more,
    ),
    split=st.sampled_from([1, 3, 4, 17]),
    budget=st.one_of(st.floats(0.05, 0.9), st.integers(17, 900)),
    chunk=st.sampled_from([None, 1, 2]),
    at_prompt_end=st.booleans(),
    decode_tokens=st.sampled_from([None, 1, 5, 3 * PART, 200]),
    min_tokens=st.integers(0, 100),
    layer_dependent=st.booleans(),
    leaves_states=st.booleans(),
)


@dataclass
class Memory:
    """What a request holds, block by block and part by part.

    Attributes:
        split: parts of a block.
        num_tokens: tokens so far.
        num_freed: logical blocks that it no longer holds.
        kept: blocks with kept tokens alone.
        beside_tail: parts of kept tokens in the tail's first block.
    """

    split: int
    num_tokens: int = 0
    num_freed: int = 0
    kept: int = 0
    beside_tail: int = 0

    def compress(self, position: int, num_kept: int, fills_tail: bool) -> int:
        """Compresses to as few blocks as hold `num_kept` parts; returns how many are new."""
        end = position // PART
        room = end % self.split if fills_tail else 0
        new = 0
        while new * self.split + room < num_kept:
            new += 1
        self.free(end)
        self.kept, self.beside_tail = new, max(0, num_kept - new * self.split)
        return new

    def stays(self, position: int) -> None:
        """Keeps as much as before, where it was."""
        former = self.num_freed
        self.free(position // PART)
        assert not self.beside_tail or self.num_freed == former, "kept tokens would be freed"

    def free(self, end: int) -> None:
        """Frees the blocks whose parts all come before part `end`."""
        while (self.num_freed + 1) * self.split <= end:
            self.num_freed += 1

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds now."""
        return math.ceil(self.num_tokens / (PART * self.split)) - self.num_freed + self.kept


def fills_tail(rule: CompressionRule) -> bool:
    """Whether kept tokens may lie beside the tail, in a block that no other request reads."""
    return not rule.layer_dependent and not rule.leaves_states


def check_budget(rule: CompressionRule, prompt: int, position: int, decision: Decision) -> None:
    """That a head keeps its budget in the mean, up to a part."""
    logical = max(prompt, position)
    budget = rule.tokens if rule.fraction is None else rule.fraction * logical
    assert budget is not None
    assert abs(decision.num_kept_blocks * PART - budget) < PART


@given(
    rule=rules, prompt=st.integers(1, 1500), answer=st.integers(1, 400), chunk=st.integers(1, 300)
)
def test_requests_hold_what_is_counted_by_hand(
    rule: CompressionRule, prompt: int, answer: int, chunk: int
) -> None:
    ledger = RequestLedger(prompt, rule, num_prompt_tokens=prompt, most_tokens=prompt + answer)
    memory, computed, most = Memory(rule.split), 0, 0
    peak, said = rule.peak_blocks(prompt + answer), []
    while computed < prompt + answer:
        if computed >= prompt:
            said.append(ledger.most_blocks())
        event = ledger.next_position(computed)
        end = min(computed + chunk, prompt) if computed < prompt else computed + 1
        end = end if event is None else min(event, end)
        memory.num_tokens = end
        most = memory.num_blocks
        assert all(most <= each for each in said)
        decision = ledger.decide(end)
        if decision is not None and not decision.skipped:
            num_kept = decision.num_kept_blocks
            check_budget(rule, prompt, end, decision)
            if ledger.may_stay_in_place(end, num_kept):
                assert num_kept == ledger.resident_blocks
                memory.stays(end)
            else:
                fresh, before = ledger.num_fresh(end, num_kept), memory.num_blocks
                assert memory.compress(end, num_kept, fills_tail(rule)) == fresh
                assert memory.num_blocks < before, "an event frees a block"
                most += fresh
            ledger.commit(end, num_kept)
            assert ledger.num_kept_allocated == memory.kept
        assert most <= peak
        assert ledger.num_freed == memory.num_freed
        computed = end


@given(
    rule=rules,
    ceiling=st.integers(2, 8),
    prompt=st.integers(1, 1500),
    answer=st.integers(1, 600),
    chunk=st.integers(1, 300),
)
def test_requests_never_hold_more_blocks_than_their_ceiling(
    rule: CompressionRule, ceiling: int, prompt: int, answer: int, chunk: int
) -> None:
    rule = replace(rule, ceiling_blocks=ceiling, min_tokens=0)
    ledger = RequestLedger(prompt, rule, num_prompt_tokens=prompt, most_tokens=prompt + answer)
    memory, computed = Memory(rule.split), 0
    while computed < prompt + answer:
        event = ledger.next_position(computed)
        assert event is not None
        end = min(computed + chunk, prompt) if computed < prompt else computed + 1
        end = min(event, end)
        memory.num_tokens = end
        decision = ledger.decide(end)
        if decision is not None and not decision.skipped:
            num_kept = decision.num_kept_blocks
            assert num_kept <= ledger.num_source_blocks(end)
            if ledger.may_stay_in_place(end, num_kept):
                memory.stays(end)
            else:
                memory.compress(end, num_kept, fills_tail(rule))
            ledger.commit(end, num_kept)
        assert memory.num_blocks <= ceiling
        assert ledger.num_kept_allocated == memory.kept
        computed = end


@given(num_kept=st.integers(1, 100), end=st.integers(1, 200), split=st.integers(1, 20))
def test_kept_parts_lie_in_new_blocks_and_beside_the_tail(
    num_kept: int, end: int, split: int
) -> None:
    rule = CompressionRule(PART, fraction=0.5, split=split)
    new, beside = rule.num_fresh(num_kept, end), rule.num_beside_tail(num_kept, end)
    assert 0 <= beside <= end % split
    assert (new - 1) * split < num_kept - beside <= new * split
    for alone in (replace(rule, layer_dependent=True), replace(rule, leaves_states=True)):
        assert alone.num_beside_tail(num_kept, end) == 0
        assert alone.num_fresh(num_kept, end) == math.ceil(num_kept / split)


@pytest.mark.parametrize(
    ("num_tokens", "kept", "fresh"),
    [(500, None, 0), (640, None, 0), (700, None, 0), (760, 12, 0), (2000, 32, 1), (2700, 42, 1)],
)
def test_prompts_of_qwen3_nexts_shape_keep_their_budget(
    num_tokens: int, kept: int | None, fresh: int
) -> None:
    """Blocks of 544 tokens; a prompt that would free none of them is left as it is."""
    rule = CompressionRule(PART, fraction=0.25, split=34)
    decision = RequestLedger(num_tokens, rule).decide(num_tokens)
    assert decision is not None
    if kept is None:
        assert decision.skipped == SKIP_NOTHING_TO_FREE
        return
    assert (decision.skipped, decision.num_kept_blocks) == (None, kept)
    assert rule.num_fresh(kept, num_tokens // PART) == fresh


def test_chunks_and_ceilings_are_whole_blocks_of_vllms() -> None:
    settings = Settings(policy="keydiff", budget=100, trigger="chunk:100", ceiling=1000)
    rule = settings.rule(32, PolicyDemand(), split=3)
    assert (rule.chunk_tokens, rule.ceiling_blocks) == (192, 10)
    assert rule.target_blocks(5000, 5000) == 4


def test_parts_are_numbered_block_by_block() -> None:
    assert kernel_blocks((5, 2), 3) == (15, 16, 17, 6, 7, 8)
    assert kernel_blocks((5, 2), 1) == (5, 2)
