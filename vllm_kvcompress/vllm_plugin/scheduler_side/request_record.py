"""Record of one request: its events, and the blocks that it holds beside vLLM's list of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm_kvcompress.scheduling.ledger import (
    PreparationLedger,
    RequestLedger,
)
from vllm_kvcompress.scheduling.plan import (
    EventPlan,
    StepPlan,
)
from vllm_kvcompress.scheduling.pressure import Candidate
from vllm_kvcompress.scheduling.read_rule import PromptChunks, ReadRule
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import StateUse

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass
class GroupBlocks:
    """Blocks that a request holds in one cache group, beside vLLM's own list of its blocks.

    Attributes:
        kept: blocks that the last event left, or those of the state that the request began with.
        fresh: blocks that `event` writes; they become `kept`.
        window: blocks for the request's last queries.
        event: event that has not run, or whose step has not been processed, so that its sources
            are still held.
    """

    kept: list[KVCacheBlock] = field(default_factory=list)
    fresh: list[KVCacheBlock] = field(default_factory=list)
    window: list[KVCacheBlock] = field(default_factory=list)
    event: EventPlan | None = None

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All blocks of the three lists."""
        return self.kept + self.fresh + self.window


@dataclass
class RequestCompression:
    """Record of one request.

    Attributes:
        ledger: its events, which are the same in all cache groups.
        groups: its blocks by cache group.
        read_rule: how much of it decode steps read; None: everything.
        reuse: kept states that it may begin with and leave.
        unsent: what workers have not been told yet.
    """

    ledger: RequestLedger
    groups: dict[int, GroupBlocks]
    read_rule: ReadRule | None = None
    reuse: StateUse = field(default_factory=StateUse)
    unsent: StepPlan = field(default_factory=StepPlan)

    @property
    def prepares(self) -> bool:
        """Whether the request prepares a context for later ones."""
        return isinstance(self.ledger, PreparationLedger)

    @property
    def context_end(self) -> int | None:
        """Tokens of the context that an event leaves to later requests; None: it leaves none."""
        if self.reuse.context_hash is None:
            return None
        if isinstance(self.ledger, PreparationLedger):
            return self.ledger.context_tokens
        return self.ledger.compress_at

    def prompt_events(self, position: int) -> list[EventPlan]:
        """Returns the prompt's event of each group if it waits for the first token at `position`.

        A step that ends there samples that token; the event runs in the step that begins there.
        """
        events = [held.event for held in self.groups.values() if held.event is not None]
        return [each for each in events if each.after_first_token and each.position == position]

    def run_event_at_once(self) -> list[EventPlan]:
        """Moves the prompt's event in front of the first token, and returns it for each group."""
        events = []
        for held in self.groups.values():
            assert held.event is not None
            held.event = replace(held.event, after_first_token=False)
            events.append(held.event)
        return events

    def num_shared(self, num_tokens: int, chunks: PromptChunks | None) -> int:
        """Counts the leading tokens, of the first `num_tokens`, whose blocks others may read.

        Not shared are tokens computed after a compression event, and generated tokens of which
        some read only a part. Where prompts are read in part, neither are the tokens of a chunk
        that would be longer in a longer prompt.
        """
        ledger, size = self.ledger, self.ledger.rule.block_size
        if ledger.first_event_position is not None:
            num_tokens = min(num_tokens, ledger.first_event_position)
        if self.read_rule is not None:
            num_read_fully = self.read_rule.num_read_fully(ledger.num_prompt_tokens, size)
            num_tokens = min(num_tokens, num_read_fully)
        if chunks is not None:
            num_tokens = chunks.num_shared(min(num_tokens, ledger.compress_at))
        return num_tokens

    def longest_hit(self, num_cached: int, num_tokens: int, chunks: PromptChunks | None) -> int:
        """Limits a prefix-cache hit to the tokens that the request may use.

        The queries that its first event needs are computed: those at the end of its prompt, or of
        the context that it names.

        Args:
            num_cached: tokens of the hit.
            num_tokens: tokens of the request.
            chunks: chunks of prompts that read a part of the cache; None: all of it is read.
        """
        limit = self.ledger.max_prefix_hit(num_tokens)
        return self.num_shared(min(num_cached, limit), chunks)

    def candidate(self, request_id: str, position: int) -> Candidate | None:
        """Returns what compressing it under memory pressure would free; None: not possible now."""
        in_flight = any(held.event for held in self.groups.values())
        if in_flight or self.ledger.rule.pressure_mark is None:
            return None
        decision = self.ledger.decide(position, under_pressure=True)
        if decision is None or decision.skipped:
            return None
        num_sources = self.ledger.num_allocated_sources(position)
        written = self.ledger.num_fresh(position, decision.num_kept_blocks)
        return Candidate(request_id, num_sources, written)


def block_ids(blocks: Iterable[KVCacheBlock]) -> tuple[int, ...]:
    """Returns the numbers by which workers know blocks."""
    return tuple(block.block_id for block in blocks)
