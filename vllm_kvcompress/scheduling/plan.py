"""What a step does besides running the model, as scheduler and workers both see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.rule import TRIGGER_PREPARE


@dataclass(frozen=True)
class EventPlan:
    """One compression event of one request, as scheduler and workers both see it.

    Attributes:
        request_id: vLLM's request id.
        group: vLLM's KV-cache group (models that mix kinds of layers have several).
        policy: the request's.
        trigger: which trigger fired, or that it prepares a context.
        position: computed tokens of the request at the end of the step.
        window_size: queries to observe: the last so many tokens before `position`.
        first_block: logical blocks [0, first_block) are already compressed.
        end_block: logical blocks [0, end_block) are compressed afterwards.
        kept_as: number of the state under which later requests may begin with what this event
            leaves; None: they may not.
        resident_blocks: fresh blocks of the former event (0: none), freed after this one.
        fresh_block_ids: the blocks that take the kept tokens.
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

    @property
    def num_source_blocks(self) -> int:
        """Blocks that the event reads: those of the former event and the full ones since."""
        return self.resident_blocks + self.num_tail_blocks

    @property
    def num_tail_blocks(self) -> int:
        """The full blocks since the former event."""
        return self.end_block - self.first_block

    @property
    def prepares(self) -> bool:
        """Whether blocks behind `end_block` have scored those before it, and are left alone."""
        return self.trigger == TRIGGER_PREPARE

    def num_partial_tokens(self, block_size: int) -> int:
        """Tokens right behind `end_block` that are kept with the others."""
        return 0 if self.prepares else self.position % block_size


@dataclass(frozen=True)
class Adoption:
    """A request that begins with a state which an earlier one had left.

    Attributes:
        request_id: vLLM's request id.
        group: vLLM's KV-cache group.
        state: the state's number.
        end_block: logical blocks [0, end_block) are compressed.
        copied: source and target of the partial block that the request goes on writing to, copied
            before the step since others may read the source; None: there is no such block.
    """

    request_id: str
    group: int
    state: int
    end_block: int
    copied: tuple[int, int] | None = None


@dataclass(frozen=True)
class Observation:
    """Which of a request's queries in this step a later event will want to see.

    Attributes:
        offset: the first such token, counted from the request's first token in the step.
        position: its position in the request.
        num_tokens: how many, consecutively.
    """

    offset: int
    position: int
    num_tokens: int


@dataclass(frozen=True)
class ReadPlan:
    """How a request is read.

    Attributes:
        rule: how much of what it holds a decode step reads.
        num_prompt_tokens: of which all is read, also where a step has one of them alone, as
            behind a prefix-cache hit; unless
        num_in_chunks: the first of them, read as the rule says of chunks of prompts, if it does.
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
    """In the debug mode: whose every block is, for workers to check what they read and write.

    Attributes:
        owned: by group and request id, all blocks of each request in the step.
        poisoned: blocks whose content nobody may read any more.
    """

    owned: dict[tuple[int, str], frozenset[int]] = field(default_factory=dict)
    poisoned: tuple[int, ...] = ()


@dataclass
class StepPlan:
    """What workers do in one step besides running the model.

    Attributes:
        events: compression events at the end of this step's attention.
        adoptions: requests that begin with a kept state.
        requests: by id, requests that are new to the workers, where there is anything to tell.
        observations: by request id, queries that a later event observes.
        saves: by id of a request that has ended, the number of the state that it leaves.
        dropped: numbers of states that are forgotten after the step.
        tags: owners of all blocks, in the debug mode.
    """

    events: list[EventPlan] = field(default_factory=list)
    adoptions: list[Adoption] = field(default_factory=list)
    requests: dict[str, RequestPlan] = field(default_factory=dict)
    observations: dict[str, Observation] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
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
    """What workers tell the scheduler of a step beside vLLM's output.

    Attributes:
        seconds: policy and duration of events whose duration became known.
        failed: requests whose event failed, and that keep what their policy did not choose.
    """

    seconds: list[tuple[str, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
