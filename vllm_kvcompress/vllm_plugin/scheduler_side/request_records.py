"""What is known about one request: when it is compressed, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvcompress.scheduling.ledger import Decision, RequestLedger
from vllm_kvcompress.scheduling.plan import EventPlan, StepPlan
from vllm_kvcompress.scheduling.pressure import Candidate
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import Beginning, KeptState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock


def block_ids(blocks: Iterable[KVCacheBlock]) -> tuple[int, ...]:
    """Numbers of blocks, by which workers know them."""
    return tuple(block.block_id for block in blocks)


@dataclass
class GroupBlocks:
    """What a request holds in one cache group, beside vLLM's own list of its blocks.

    Attributes:
        kept: what the last event left, or that of the state that the request began with.
        fresh: blocks that `event` writes; they become `kept`.
        window: for the request's last queries.
        event: whose step has not been processed yet, so that its sources are still held.
    """

    kept: list[KVCacheBlock] = field(default_factory=list)
    fresh: list[KVCacheBlock] = field(default_factory=list)
    window: list[KVCacheBlock] = field(default_factory=list)
    event: EventPlan | None = None

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All of them."""
        return self.kept + self.fresh + self.window


@dataclass
class RequestCompression:
    """What is known about a request: when it is compressed, and what it holds meanwhile.

    Attributes:
        ledger: its events, which are the same in all cache groups.
        groups: its blocks, by cache group.
        use: stands for the states that it may begin with, and leaves; None: it does neither.
        context_hash: of its context's last block, if what the event there leaves is such a state.
        begins_anew: it may not begin with one.
        selected: it is to be compressed in this step because room is needed.
        beginning: what it can begin with; set until it is admitted.
        began_with: the number of the state that it did begin with.
        state: whose blocks it holds, beside its own.
        read_rule: how much decode steps read of it; None: everything.
        unsent: what the workers have not been told yet.
    """

    ledger: RequestLedger
    groups: dict[int, GroupBlocks]
    use: Hashable = None
    context_hash: BlockHash | None = None
    begins_anew: bool = False
    selected: bool = False
    beginning: Beginning | None = None
    began_with: int | None = None
    state: KeptState | None = None
    read_rule: ReadRule | None = None
    unsent: StepPlan = field(default_factory=StepPlan)

    def decide(self, position: int) -> Decision | None:
        """What happens when `position` tokens have been computed; None: nothing."""
        return self.ledger.decide(position, self.selected)

    def candidate(self, request_id: str, position: int) -> Candidate | None:
        """What compressing it would give at a position; None: nothing, or not now."""
        in_flight = any(part.event for part in self.groups.values())
        if in_flight or self.ledger.rule.pressure_mark is None:
            return None
        decision = self.ledger.decide(position, under_pressure=True)
        if decision is None or decision.skipped:
            return None
        sources = self.ledger.num_source_blocks(position)
        return Candidate(request_id, sources, decision.num_kept_blocks)
