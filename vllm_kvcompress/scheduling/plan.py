"""Step plans: what workers do in a step besides running the model, and what they report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.rule import TRIGGER_PREPARE

Spans = tuple[tuple[int, int], ...]  # [start, end) of logical tokens, ascending and disjoint


def kernel_blocks(block_ids: Iterable[int], split: int) -> tuple[int, ...]:
    """Returns the numbers that attention kernels have for the parts of vLLM's blocks, in order."""
    if split == 1:
        return tuple(block_ids)
    return tuple(block * split + part for block in block_ids for part in range(split))


def num_in_spans(spans: Spans, end: int) -> int:
    """Counts the tokens of spans that lie before `end`."""
    return sum(max(0, min(stop, end) - start) for start, stop in spans)


@dataclass(frozen=True)
class EventPlan:
    """Compression event of one request in one cache group.

    Blocks are those of attention kernels (see `rule.py`).

    Attributes:
        request_id: vLLM's request id.
        group: vLLM's KV-cache group (models that mix kinds of layers have several).
        policy: name of the request's policy.
        trigger: trigger that fired; "prepare": the event compresses a context.
        position: computed tokens of the request that the event sees.
        window_size: number of last queries before `position` to observe.
        first_block: logical blocks [0, first_block) are already compressed.
        end_block: logical blocks [0, end_block) are compressed afterwards.
        resident_blocks: blocks of the former event's kept tokens (0: none), freed after this one.
        fresh_block_ids: blocks that take the kept tokens; empty: they stay in the former event's
            blocks, which nobody else reads.
        kept_as: number of the kept state that this event leaves to later requests; None: none.
        after_first_token: whether it runs before the forward pass of the request's next step, so
            that the first token does not wait for it; else behind attention or sampling.
        protected: logical tokens that every head keeps.
        beside_tail: last blocks before `end_block` that take kept tokens as well, since they are a
            part of one of vLLM's blocks that goes on with the tail.
        num_freed_blocks: blocks of vLLM's that go back to the pool once the event has run.
    """

    request_id: str
    group: int
    policy: str
    trigger: str
    position: int
    window_size: int
    first_block: int
    end_block: int
    resident_blocks: int
    fresh_block_ids: tuple[int, ...]
    kept_as: int | None = None
    after_first_token: bool = False
    protected: Spans = ()
    beside_tail: tuple[int, ...] = ()
    num_freed_blocks: int = 0

    @property
    def done_at(self) -> int:
        """Computed tokens of the request at the end of the step in which the event runs, at least.

        Its sources may be freed once that step has been processed.
        """
        return self.position + self.after_first_token

    @property
    def in_place(self) -> bool:
        """Whether the kept tokens stay in the blocks of the former event's kept tokens."""
        return not self.fresh_block_ids and not self.beside_tail

    @property
    def overwrites(self) -> bool:
        """Whether kept tokens are written to pages that are read in the same event."""
        return self.in_place or bool(self.beside_tail)

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that hold the kept tokens afterwards."""
        if self.in_place:
            return self.resident_blocks
        return len(self.fresh_block_ids) + len(self.beside_tail)

    @property
    def num_source_blocks(self) -> int:
        """Blocks that the event reads: those of the former event, and full ones since."""
        return self.resident_blocks + self.num_tail_blocks

    @property
    def num_tail_blocks(self) -> int:
        """Full blocks since the former event."""
        return self.end_block - self.first_block

    @property
    def prepares(self) -> bool:
        """Whether blocks behind `end_block` scored those before it, and stay as they are."""
        return self.trigger == TRIGGER_PREPARE

    def num_partial_tokens(self, block_size: int) -> int:
        """Counts the tokens right behind `end_block`, which are kept with the others."""
        return 0 if self.prepares else self.position % block_size


@dataclass(frozen=True)
class Adoption:
    """Request that begins with the kept state of an earlier request.

    Attributes:
        request_id: vLLM's request id.
        group: vLLM's KV-cache group.
        state: number of the kept state.
        end_block: logical blocks [0, end_block) of attention kernels are compressed.
    """

    request_id: str
    group: int
    state: int
    end_block: int


@dataclass(frozen=True)
class BlockCopy:
    """Copy of a kept state's partial block, whose source others may read.

    Attributes:
        source: block of the state.
        target: block that a request which begins with the state goes on writing to.
    """

    source: int
    target: int


@dataclass(frozen=True)
class HostTransfer:
    """Copy of a kept state's blocks to host memory, or back to other blocks.

    Attributes:
        state: number of the kept state.
        to_host: whether blocks are copied to the host, or from it.
        blocks: blocks of the pool; the first `num_kept` have the kept tokens.
        slots: blocks of host memory, as many.
        num_kept: number of blocks with the tokens that the state's event kept.
        former: on the way back, the blocks that the state's page table still names.
    """

    state: int
    to_host: bool
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    num_kept: int
    former: tuple[int, ...] = ()


@dataclass(frozen=True)
class Observation:
    """Consecutive queries of a request in this step that a later event observes.

    Attributes:
        offset: first such token, counted from the request's first token in the step.
        position: position of that token in the request.
        num_tokens: number of tokens.
    """

    offset: int
    position: int
    num_tokens: int


@dataclass(frozen=True)
class ReadPlan:
    """How much of a request's cache its queries read.

    Attributes:
        rule: how much a decode step reads.
        num_prompt_tokens: prompt tokens, whose queries read everything, even one alone in a step,
            as behind a prefix-cache hit.
        num_in_chunks: leading prompt tokens that the rule's prompt chunks cover, if it has any;
            their queries read a part.
    """

    rule: ReadRule
    num_prompt_tokens: int = 0
    num_in_chunks: int = 0


@dataclass
class RequestPlan:
    """What workers need to know of a request that is new to them.

    Attributes:
        read: how it is read; None: all of it.
        scored_tokens: leading tokens that the prompt's other tokens score, where the request
            prepares a context; 0 elsewhere.
        windows: by cache group, blocks for the request's last queries.
    """

    read: ReadPlan | None = None
    scored_tokens: int = 0
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return any(vars(self).values())


@dataclass(frozen=True)
class BlockTags:
    """Owners of all blocks, by which workers check in the debug mode what they read and write.

    Attributes:
        owned: by group and request id, all blocks of each request in the step.
        poisoned: blocks whose content must not be read any more.
        cleared: blocks of draft layers for new tokens, which may have been poisoned.
        has_other_pages: whether values of other layers may lie where keys are poisoned.
    """

    owned: dict[tuple[int, str], frozenset[int]] = field(default_factory=dict)
    poisoned: tuple[int, ...] = ()
    cleared: tuple[int, ...] = ()
    has_other_pages: bool = False


@dataclass
class StepPlan:
    """What workers do in one step besides running the model.

    Attributes:
        events: compression events of this step.
        adoptions: requests that begin with a kept state.
        requests: by id, requests that are new to the workers, where there is anything to tell.
        observations: by request id, queries that a later event observes.
        saves: by id of a request that has ended, the number of the state that it leaves.
        dropped: numbers of states that are forgotten after the step.
        transfers: copies of kept states' blocks, before anything is written in the step, in the
            order in which they were decided: a later one may write to what an earlier one reads.
        tags: owners of all blocks, in the debug mode.
    """

    events: list[EventPlan] = field(default_factory=list)
    adoptions: list[Adoption] = field(default_factory=list)
    requests: dict[str, RequestPlan] = field(default_factory=dict)
    observations: dict[str, Observation] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    transfers: list[HostTransfer | BlockCopy] = field(default_factory=list)
    tags: BlockTags | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return any(vars(self).values())

    def add(self, other: StepPlan) -> None:
        """Merges the unsent plan of one request into this one."""
        self.events += other.events
        self.adoptions += other.adoptions
        self.requests |= other.requests


@dataclass(frozen=True)
class StepReport:
    """What workers tell the scheduler about a step beside vLLM's output.

    Attributes:
        seconds: policy and duration of events whose duration became known.
        failed: requests whose event failed; the guard chose what they keep.
    """

    seconds: list[tuple[str, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
