"""When a request is compressed, down to how many blocks, and what it holds meanwhile.

Pure arithmetic on token positions and block counts. Scheduler and workers derive everything
from the same rule and the same positions, so they never have to agree after the fact.

    logical tokens   0 ............ c*bs ............ F*bs ... e
    resident         [ kept blocks ][ full tail blocks ][partial]
    event at e       sources: kept + tail blocks  ->  K fresh blocks; the partial block stays
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

TRIGGER_PROMPT = "prompt"
TRIGGER_CHUNK = "chunk"
TRIGGER_DECODE = "decode"
TRIGGER_PRESSURE = "pressure"

SKIP_SHORT = "shorter_than_min_tokens"
SKIP_NOTHING_TO_FREE = "nothing_to_free"


@dataclass(frozen=True)
class CompressionRule:
    """The user's budget and triggers, in tokens and blocks.

    Attributes:
        block_size: tokens of a block.
        fraction: kept fraction of the logical tokens, or None.
        tokens: kept tokens per head, or None. Exactly one of the two is set.
        at_prompt_end: compress when the last prompt token has been computed.
        chunk_tokens: compress at every multiple of this many prompt tokens, at the prompt's
            end, and after each further so many generated tokens (unless `decode_tokens` says
            otherwise); a multiple of the block size, or None.
        decode_tokens: compress after each so many generated tokens, or None.
        pressure_mark: compress requests that generate when the pool is fuller than this part of
            it, or others wait for room; None: never for that.
        min_tokens: leave requests alone while they have fewer logical tokens.
        window_size: the last queries that the policy observes at an event.
        least_blocks: what an event leaves at least: one page per layer and head, and room for
            what the policy carries on.
        window_blocks: that hold a request's last queries, under pressure.
    """

    block_size: int
    fraction: float | None = None
    tokens: int | None = None
    at_prompt_end: bool = True
    chunk_tokens: int | None = None
    decode_tokens: int | None = None
    pressure_mark: float | None = None
    min_tokens: int = 0
    window_size: int = 0
    least_blocks: int = 1
    window_blocks: int = 0

    def next_position(self, num_prompt_tokens: int, after: int) -> int | None:
        """First position > `after` (in computed tokens) at which an event may happen."""
        candidates = []
        if self.chunk_tokens and after < num_prompt_tokens:
            boundary = (after // self.chunk_tokens + 1) * self.chunk_tokens
            candidates.append(min(boundary, num_prompt_tokens))
        elif self.at_prompt_end and after < num_prompt_tokens:
            candidates.append(num_prompt_tokens)
        stride = self.decode_tokens or self.chunk_tokens
        if stride:
            generated = max(0, after - num_prompt_tokens)
            candidates.append(num_prompt_tokens + (generated // stride + 1) * stride)
        return min(candidates, default=None)

    def is_position(self, num_prompt_tokens: int, position: int) -> bool:
        """Whether an event may happen when `position` tokens have been computed."""
        return self.next_position(num_prompt_tokens, position - 1) == position

    def trigger_at(self, num_prompt_tokens: int, position: int) -> str:
        """Name of the trigger that fires at an event position."""
        if position == num_prompt_tokens and (self.at_prompt_end or self.chunk_tokens):
            return TRIGGER_PROMPT if self.at_prompt_end else TRIGGER_CHUNK
        if position < num_prompt_tokens or not self.decode_tokens:
            return TRIGGER_CHUNK
        return TRIGGER_DECODE

    def target_blocks(self, num_prompt_tokens: int, position: int) -> int:
        """Blocks that the full blocks of a request are to be compressed to.

        A fraction counts from the whole prompt while it is being read (so that its beginning
        is not squeezed more than its end), and from all tokens so far afterwards.
        """
        num_full_blocks = max(num_prompt_tokens, position) // self.block_size
        if self.fraction is not None:
            wanted = math.ceil(round(self.fraction * num_full_blocks, 6))
        else:
            assert self.tokens is not None
            wanted = math.ceil(self.tokens / self.block_size)
        return max(self.least_blocks, wanted)

    def first_effective_position(self, num_prompt_tokens: int) -> int | None:
        """First position at which a request with this prompt really is compressed, if any.

        Only positions up to the end of the prompt: what follows is not known yet.
        """
        position = self.next_position(num_prompt_tokens, 0)
        while position is not None and position <= num_prompt_tokens:
            num_full_blocks = position // self.block_size
            target = self.target_blocks(num_prompt_tokens, position)
            if position >= self.min_tokens and target < num_full_blocks:
                return position
            position = self.next_position(num_prompt_tokens, position)
        return None

    def max_prefix_hit(self, num_prompt_tokens: int) -> int:
        """Longest usable prefix-cache hit, in tokens.

        A hit leaves no queries behind, so the first event's observation window has to be
        computed anew, and at least one token, so that a step ends at the event.
        """
        position = self.first_effective_position(num_prompt_tokens)
        if position is None and self.pressure_mark is not None:
            position = num_prompt_tokens  # from then on an event may come at any token
        if position is None:
            return num_prompt_tokens - 1
        return max(0, min(num_prompt_tokens - 1, position - max(1, self.window_size)))

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of up to `num_tokens` tokens ever holds at once."""
        num_blocks = math.ceil(num_tokens / self.block_size)
        kept = min(self.target_blocks(num_tokens, num_tokens), num_blocks)
        peak = num_blocks + kept
        if self.chunk_tokens:
            stride = max(self.chunk_tokens, self.decode_tokens or 0)
            # kept + chunk + fresh; one more chunk while a step's sources are not yet freed. Before
            # the first event nothing is kept, but all tokens up to `min_tokens` are there.
            before = max(kept, math.ceil(self.min_tokens / self.block_size))
            bounded = before + kept + 2 * math.ceil(stride / self.block_size) + 2
            peak = min(peak, bounded)
        return peak

    def admission_blocks(self, num_tokens: int) -> int:
        """Blocks that a request needs free to read all of `num_tokens` tokens."""
        if self.first_effective_position(num_tokens) is None:
            return math.ceil(num_tokens / self.block_size) + self.window_blocks
        return self.peak_blocks(num_tokens) + self.window_blocks

    def held_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens holds between events: kept ones and a tail.

        The tail of a prompt is a partial block; with events in between it grows up to the next.
        """
        num_blocks = math.ceil(num_tokens / self.block_size)
        if self.first_effective_position(num_tokens) is None and self.pressure_mark is None:
            return num_blocks
        tail = self.decode_tokens or self.chunk_tokens or 1
        kept = self.target_blocks(num_tokens, num_tokens)
        kept = min(num_blocks, kept + math.ceil(tail / self.block_size))
        return kept + self.window_blocks

    def concurrency(self, num_tokens: int, pool_blocks: int) -> float:
        """How many requests of `num_tokens` tokens a pool serves at a time.

        All but one hold what is left of them, and the last one has room to be read.
        """
        waiting = pool_blocks - self.admission_blocks(num_tokens)
        if waiting < 0:
            return pool_blocks / self.admission_blocks(num_tokens)
        return 1 + waiting / self.held_blocks(num_tokens)


@dataclass(frozen=True)
class EventPlan:
    """One compression event of one request, as scheduler and workers both see it.

    Attributes:
        request_id: vLLM's request id.
        group: vLLM's KV-cache group (models that mix kinds of layers have several).
        policy: the request's.
        trigger: which trigger fired.
        position: computed tokens of the request at the end of the step.
        window_size: queries to observe: the last so many tokens before `position`.
        first_block: logical blocks [0, first_block) are already compressed.
        end_block: logical blocks [0, end_block) are compressed afterwards.
        reusable: later requests may begin with what this event leaves.
        resident_blocks: fresh blocks of the former event (0: none), freed after this one.
        fresh_block_ids: the blocks that take the survivors.
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
    reusable: bool = False

    @property
    def num_source_blocks(self) -> int:
        """Blocks that the event reads: those of the former event and the full ones since."""
        return self.resident_blocks + self.end_block - self.first_block


@dataclass(frozen=True)
class Adoption:
    """A request that begins with a context which an earlier one had compressed.

    Attributes:
        request_id: vLLM's request id.
        group: vLLM's KV-cache group.
        first_block_id: the first block that holds what is left of the context.
        end_block: logical blocks [0, end_block) are the context.
    """

    request_id: str
    group: int
    first_block_id: int
    end_block: int


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
class StepPlan:
    """What workers do in one step besides running the model.

    Attributes:
        events: the compression events at the end of this step's attention.
        adoptions: requests that begin with a context, compressed before.
        windows: by group and request id, the blocks that its last queries are to lie in.
        observations: by request id; only for policies that look at queries.
    """

    events: tuple[EventPlan, ...] = ()
    adoptions: tuple[Adoption, ...] = ()
    windows: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    observations: dict[str, Observation] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What the rule says at a position: an event down to `num_kept_blocks`, or a reason why not."""

    trigger: str
    num_kept_blocks: int
    skipped: str | None = None


@dataclass
class RequestLedger:
    """The books of one request.

    Attributes:
        num_prompt_tokens: logical tokens of the prompt; of its context, where the request names
            one that is compressed before the rest is read (the rest then counts as generated).
        rule: when and how far this request is compressed.
        policy: what with; see `policies`.
        compressed_blocks: logical full blocks that have been compressed (c above).
        resident_blocks: fresh blocks that hold what is left of them.
        last_position: position of the last event (0: none yet).
        first_event_position: position of the first event; later tokens depend on it.
        num_read_tokens: logical tokens of the whole prompt, behind a named context, too.
        context_key: stands for the named context and how it is compressed, where that may be
            kept for later requests.
    """

    num_prompt_tokens: int
    rule: CompressionRule
    policy: str = ""
    compressed_blocks: int = 0
    resident_blocks: int = 0
    last_position: int = 0
    first_event_position: int | None = None
    num_read_tokens: int = 0
    context_key: Hashable = None

    def adopt(self, end_block: int, num_kept_blocks: int) -> None:
        """Books a context that an earlier request had compressed, instead of an event."""
        self.commit(end_block * self.rule.block_size, num_kept_blocks)

    def decide(self, position: int, pressed: bool = False) -> Decision | None:
        """What happens when `position` tokens have been computed; None: no trigger fires.

        Args:
            position: in computed tokens.
            pressed: room is needed.
        """
        if self.rule.is_position(self.num_prompt_tokens, position):
            trigger = self.rule.trigger_at(self.num_prompt_tokens, position)
        elif pressed:
            trigger = TRIGGER_PRESSURE
        else:
            return None
        num_kept = self.rule.target_blocks(self.num_prompt_tokens, position)
        if position < self.rule.min_tokens:
            return Decision(trigger, num_kept, SKIP_SHORT)
        if num_kept >= self.num_source_blocks(position):
            return Decision(trigger, num_kept, SKIP_NOTHING_TO_FREE)
        return Decision(trigger, num_kept)

    def num_source_blocks(self, position: int) -> int:
        """Blocks that an event at a position reads: kept ones, and full ones since."""
        return self.resident_blocks + position // self.rule.block_size - self.compressed_blocks

    def observed_window(self, position: int) -> int:
        """Queries that an event at `position` observes.

        Never older than the last event (what they attended to is gone), and after the prompt
        never prompt tokens (a prefix-cache hit would leave them without queries; under the
        pressure trigger it does not).
        """
        oldest = self.last_position
        if position > self.num_prompt_tokens and self.rule.pressure_mark is None:
            oldest = max(oldest, self.num_prompt_tokens)
        return min(self.rule.window_size, position - oldest)

    def commit(self, position: int, num_kept_blocks: int) -> None:
        """Books an event."""
        self.compressed_blocks = position // self.rule.block_size
        self.resident_blocks = num_kept_blocks
        self.last_position = position
        if self.first_event_position is None:
            self.first_event_position = position

    def observation(self, start: int, end: int) -> Observation | None:
        """Which queries of the tokens [start, end) a coming event observes, if any."""
        if not self.rule.window_size:
            return None
        if self.rule.pressure_mark is not None:  # the event may come with any token
            first = max(start, end - self.rule.window_size)
            return Observation(first - start, first, end - first)
        position = self.rule.next_position(self.num_prompt_tokens, start)
        if position is None:
            return None
        first = max(start, position - self.rule.window_size)
        if first >= end:
            return None
        return Observation(first - start, first, min(end, position) - first)

    def resident_tokens(self, num_tokens: int) -> int:
        """Resident tokens per head (mean over heads and layers) at `num_tokens` logical ones."""
        tail = num_tokens - self.compressed_blocks * self.rule.block_size
        return self.resident_blocks * self.rule.block_size + tail
