"""Ledgers: when a request is compressed, down to how many blocks, and what it holds meanwhile.

logical tokens   0 ............ c*bs ............ F*bs ... e
resident         [ kept blocks ][ full tail blocks ][partial]
event at e       sources: kept + tail blocks  ->  K fresh blocks; the partial block stays
hit of h tokens  0 .. h were computed by others: e observes the queries of h .. e, at most a window
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import Observation, Spans, num_in_spans
from vllm_kvcompress.scheduling.rule import (
    TRIGGER_CEILING,
    TRIGGER_PREPARE,
    TRIGGER_PRESSURE,
    TRIGGER_REASONING,
    CompressionRule,
)

# Steps that may be under way when the token that ends the reasoning becomes known: queries of their
# tokens may not have been recorded for an event behind it.
STEPS_UNTIL_KNOWN = 4

SKIP_SHORT = "shorter_than_min_tokens"
SKIP_NOTHING_TO_FREE = "nothing_to_free"
SKIP_ONE_TOKEN = "ends_with_first_token"
SKIP_SHORT_ANSWER = "short_answer"
SKIP_PROTECTED = "protected_tokens"
SKIP_ERROR = "error"
SKIP_REASONS = {  # why an event that a trigger called for is left out
    SKIP_SHORT: "fewer logical tokens than min_tokens",
    SKIP_NOTHING_TO_FREE: "the budget is no smaller than what the request holds",
    SKIP_ONE_TOKEN: "nothing is generated behind the first token",
    SKIP_SHORT_ANSWER: "an answer limited to fewer than min_answer_tokens, while there was room",
    SKIP_PROTECTED: "the budget has no room for tokens that the request, or the model, needs",
    SKIP_ERROR: "the policy failed, and the request ended with an error",
}


@dataclass(frozen=True)
class Decision:
    """Event down to `num_kept_blocks` blocks, or the reason why it is left out."""

    trigger: str
    num_kept_blocks: int
    skipped: str | None = None


@dataclass
class RequestLedger:
    """Events of one request.

    Attributes:
        compress_at: logical tokens of the prompt, or of the context that the request names; the
            tokens behind that then count as generated.
        rule: when and how far the request is compressed.
        policy: name of its policy.
        compressed_blocks: logical full blocks that have been compressed (c above).
        resident_blocks: blocks that hold their kept tokens.
        num_kept_allocated: blocks of vLLM's that the last event has taken for these; the others
            lie beside the tail.
        last_position: position of the last event; 0: none yet.
        first_event_position: position of the first event, on which later tokens depend.
        num_prompt_tokens: logical tokens of the prompt, those behind a named context included.
        num_hit_tokens: logical tokens of the prefix-cache hit or kept state that the request begins
            with, which leave no queries.
        most_tokens: logical tokens that the request computes at most, its answer included.
        protected: tokens that every event keeps.
        reasoning_end: logical tokens up to the one that ends the model's reasoning; None: it has
            not ended, or nothing depends on it.
    """

    compress_at: int
    rule: CompressionRule
    policy: str = ""
    compressed_blocks: int = 0
    resident_blocks: int = 0
    num_kept_allocated: int = 0
    last_position: int = 0
    first_event_position: int | None = None
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    most_tokens: int = 0
    protected: Spans = ()
    reasoning_end: int | None = None
    # The last answer of `next_position` and what it was for; it is asked several times in a step.
    _known: tuple[int, int | None] | None = field(default=None, init=False, compare=False)

    def next_position(self, after: int) -> int | None:
        """Finds the first position > `after`, in computed tokens, at which an event may happen.

        A ceiling adds the positions at which the request holds as much as it may, and the end of a
        prompt that has exceeded it, whose last queries say best what to keep. The end of reasoning
        adds one soon behind it.
        """
        if self._known is not None:
            asked, position = self._known
            if asked <= after and (position is None or after < position):
                return position
        position = self._next_position(after)
        self._known = (after, position)
        return position

    def _next_position(self, after: int) -> int | None:
        positions = [self.rule.next_position(self.compress_at, after)]
        if after < self.last_position:
            positions.append(self.last_position)
        if (full := self._full_at) is not None:
            positions.append(max(full, after + 1))
            if self.compressed_blocks and after < self.compress_at:
                positions.append(self.compress_at)
        if (answer := self._answer_at) is not None and after < answer:
            positions.append(answer)
        return min((each for each in positions if each is not None), default=None)

    @property
    def _full_at(self) -> int | None:
        """Position at which the request holds as much as its ceiling allows; None: it has none."""
        if self.rule.ceiling_blocks is None:
            return None
        room = self.rule.ceiling_blocks - self.num_kept_allocated
        return (self.num_freed + room) * self.rule.allocated_size

    @property
    def num_freed(self) -> int:
        """Leading blocks of vLLM's that have been compressed completely."""
        return self.compressed_blocks // self.rule.split

    def may_stay_in_place(self, position: int, num_kept: int) -> bool:
        """Whether an event could write to the pages of the former one's kept tokens.

        It keeps as many, in the same layers, and none of these pages lies in a block that it frees.
        """
        if num_kept != self.resident_blocks or self.rule.layer_dependent:
            return False
        lie_beside_tail = self.resident_blocks > self.num_kept_allocated * self.rule.split
        end = self.end_of_event(position) // self.rule.allocated_size
        return not lie_beside_tail or end == self.num_freed

    def num_allocated_sources(self, position: int) -> int:
        """Counts the blocks of vLLM's that an event frees unless it stays in place."""
        end = self.end_of_event(position) // self.rule.allocated_size
        return self.num_kept_allocated + end - self.num_freed

    def num_fresh(self, position: int, num_kept: int) -> int:
        """Counts the blocks of vLLM's that an event allocates unless it stays in place."""
        end_block = self.end_of_event(position) // self.rule.block_size
        return self.rule.num_fresh(num_kept, end_block)

    def end_reasoning(self, end: int | None) -> None:
        """Records up to which logical token the model has reasoned; None: it has not ended."""
        self.reasoning_end, self._known = end, None

    @property
    def _answer_at(self) -> int | None:
        """Position of the event that follows the end of reasoning; None: there is none.

        It follows from the position of that end alone, with as many queries behind it as the policy
        needs.
        """
        if self.reasoning_end is None or self.rule.after_reasoning is None:
            return None
        first = self.reasoning_end + STEPS_UNTIL_KNOWN + max(1, self.rule.needed_queries)
        return ceil_div(first, self.rule.block_size) * self.rule.block_size

    def protected_at(self, position: int) -> Spans:
        """Returns the tokens that an event keeps: behind the end of reasoning also the answer's."""
        if position != self._answer_at or self.reasoning_end is None:
            return self.protected
        first = max(self.reasoning_end, self.compressed_blocks * self.rule.block_size)
        return (*self.protected, (first, position))

    def usable_tokens(self, position: int, num_kept_blocks: int, num_tokens: int) -> int:
        """Counts the tokens of a kept state that this request can begin with; 0: none.

        Queries that the next event needs must be computed anew, since no state keeps them. The
        tokens that the state's event saw are taken together or not at all.

        Args:
            position: position of the state's last event.
            num_kept_blocks: blocks that it left.
            num_tokens: leading tokens that the request shares with the state.
        """
        after = replace(self)
        after.commit(position, num_kept_blocks)
        while num_tokens >= position:
            event = after.next_position(num_tokens)
            if self.rule.pressure_mark is not None:  # any token behind the prompt may be an event
                event = min(event or self.num_prompt_tokens, self.num_prompt_tokens)
            if event is None:
                return num_tokens
            limit = event - min(self.rule.needed_queries, after.observed_window(event))
            if num_tokens <= limit:
                return num_tokens
            num_tokens = limit
        return 0

    def max_prefix_hit(self, num_tokens: int) -> int:
        """Returns the longest usable prefix-cache hit, in tokens, within a named context.

        Args:
            num_tokens: tokens of the request, those included that it generated before a preemption.
        """
        has_context = self.compress_at < self.num_prompt_tokens
        return self.rule.max_prefix_hit(self.compress_at if has_context else num_tokens)

    def decide(self, position: int, under_pressure: bool = False) -> Decision | None:
        """Decides what happens once `position` tokens are computed; None: no trigger fires.

        Memory pressure fires where the request was selected because of it (`under_pressure`).
        """
        is_position = self.next_position(position - 1) == position
        if not (is_position or under_pressure):
            return None  # of all requests in nearly every step
        protected, at_answer = self.protected_at(position), position == self._answer_at
        if at_answer:
            trigger = TRIGGER_REASONING
        elif self.rule.is_position(self.compress_at, position):
            trigger = self.rule.trigger_at(self.compress_at, position)
        elif is_position:
            trigger = TRIGGER_CEILING
        else:
            trigger = TRIGGER_PRESSURE
        end = max(self.compress_at, position)
        num_protected = num_in_spans(protected, end)
        num_kept = self.rule.target_blocks(self.compress_at, position)
        if at_answer:
            num_kept = self.rule.blocks_after_reasoning(num_protected, position - num_protected)
        is_full = self._full_at is not None and position >= self._full_at
        if position < self.rule.min_tokens and not is_full:
            return Decision(trigger, num_kept, SKIP_SHORT)
        num_sources = self.num_source_blocks(position)
        if is_full:  # what is held may fit into fewer blocks of vLLM's without a loss
            num_kept = min(num_kept, num_sources)
        frees = self.num_fresh(position, num_kept) < self.num_allocated_sources(position)
        stays = self.may_stay_in_place(position, num_kept) and num_kept < num_sources
        if num_kept > num_sources or not (frees or stays):
            return Decision(trigger, num_kept, SKIP_NOTHING_TO_FREE)
        if not self.rule.has_room(num_kept, num_protected):
            return Decision(trigger, num_kept, SKIP_PROTECTED)
        return Decision(trigger, num_kept)

    def follows_first_token(self, position: int) -> bool:
        """Whether an event at `position` may wait until the first token has been sampled.

        It does at the prompt's end, unless the next event may come within the next step.
        """
        if not position == self.compress_at == self.num_prompt_tokens:
            return False
        after = replace(self)
        after.commit(position, self.rule.target_blocks(self.compress_at, position))
        following = after.next_position(position)
        return following is None or following - position >= self.rule.block_size

    def num_source_blocks(self, position: int) -> int:
        """Counts the blocks that an event reads: kept ones, and full ones since."""
        return self.resident_blocks + position // self.rule.block_size - self.compressed_blocks

    def end_of_event(self, position: int) -> int:
        """Returns the number of leading tokens whose full blocks an event compresses."""
        return position

    def observed_window(self, position: int) -> int:
        """Counts the last queries that an event at `position` observes.

        They are those of tokens that this request computes, so a prefix-cache hit leaves fewer:
        at least `CompressionRule.needed_queries` before the first event. They are never older than
        the last event, since what they attended to is gone. Behind the prompt they are never prompt
        tokens, except under the pressure trigger and a ceiling.
        """
        oldest = max(self.last_position, self.num_hit_tokens)
        if position == self._answer_at and self.reasoning_end is not None:
            oldest = max(oldest, self.reasoning_end + STEPS_UNTIL_KNOWN)
        sees_prompt = self.rule.pressure_mark is not None or self._full_at is not None
        if position > self.compress_at and not sees_prompt:
            oldest = max(oldest, self.compress_at)
        return min(self.rule.window_size, position - oldest)

    def commit(self, position: int, num_kept_blocks: int) -> None:
        """Records an event, or that of a kept state which the request begins with."""
        if not self.may_stay_in_place(position, num_kept_blocks):
            end_block = position // self.rule.block_size
            self.num_kept_allocated = self.rule.num_fresh(num_kept_blocks, end_block)
        self.compressed_blocks = position // self.rule.block_size
        self.resident_blocks = num_kept_blocks
        self.last_position = position
        self._known = None
        if self.first_event_position is None:
            self.first_event_position = position

    def observation(self, start: int, end: int) -> Observation | None:
        """Returns which queries of the tokens [start, end) a coming event observes, if any."""
        if not self.rule.window_size:
            return None
        if self.rule.pressure_mark is not None:  # the event may come with any token
            first = max(start, end - self.rule.window_size)
            return Observation(first - start, first, end - first)
        position = self.next_position(start)
        while position is not None and not self._expects_event(position):
            position = self.next_position(position)
        if position is None:
            return None
        first = max(start, position - self.rule.window_size)
        if first >= end:
            return None
        return Observation(first - start, first, min(end, position) - first)

    def most_blocks(self) -> int:
        """Counts the most blocks of vLLM's that the request still comes to hold between events.

        These are all up to its last token, unless its ceiling, or events before that, keep it from
        getting as far.
        """
        rule, size = self.rule, self.rule.allocated_size
        if not self.last_position and rule.first_effective_position(self.compress_at):
            after = replace(self)
            after.commit(self.compress_at, rule.target_blocks(self.compress_at, self.compress_at))
            return max(after.most_blocks(), rule.limited(ceil_div(self.compress_at, size)))
        held = self.num_kept_allocated + ceil_div(self.most_tokens, size) - self.num_freed
        stride = rule.decode_tokens or rule.chunk_tokens
        if stride:
            target = rule.target_blocks(self.compress_at, self.most_tokens)
            kept = max(ceil_div(target, rule.split), self.num_kept_allocated)
            before = max(kept, ceil_div(rule.min_tokens, size))
            if not self.last_position:
                before = max(before, ceil_div(self.compress_at, size))
            held = min(held, before + ceil_div(stride, size) + 1)
        return rule.limited(held)

    def fresh_blocks(self) -> int:
        """Counts the most blocks of vLLM's that an event to come takes; 0: it takes none."""
        position = self.next_position(self.last_position)
        if position is None or position > self.most_tokens:
            return 0
        num_kept = self.rule.target_blocks(self.compress_at, self.most_tokens)
        if self.may_stay_in_place(self.most_tokens, num_kept):
            return 0
        return ceil_div(num_kept, self.rule.split)

    def _expects_event(self, position: int) -> bool:
        """Whether an event at `position`, or soon after it, is planned already or will be."""
        if position == self.last_position or self.rule.chunk_tokens or self.rule.decode_tokens:
            return True
        decision = self.decide(position)
        return decision is not None and not decision.skipped

    def resident_tokens(self, num_tokens: int) -> int:
        """Counts resident tokens per head at `num_tokens` logical ones, in the mean over heads."""
        num_tail_tokens = num_tokens - self.compressed_blocks * self.rule.block_size
        return self.resident_blocks * self.rule.block_size + num_tail_tokens


@dataclass
class PreparationLedger(RequestLedger):
    """Ledger of a request that prepares a context for later ones: the rest of its prompt scores it.

    logical tokens   0 ........... context ................................ prompt
                     [ compressed at the prompt's end ][ scores the context ]
    chunks           [ any ][ any ][ up to there      ][ two or more ][ .. ]

    The only event is at the prompt's end. It leaves as many blocks as an ordinary request that
    names the same context. While a context is scored, each of its tokens has a score in every
    layer and head. There is memory for the scores of the longest request; so some requests wait
    at the end of their context for others.

    Attributes:
        context_tokens: tokens of the context that are compressed, in full blocks.
        is_scored: whether the tokens behind the context are being read, or were.
    """

    context_tokens: int = 0
    is_scored: bool = False

    @classmethod
    def of(
        cls, rule: CompressionRule, policy: str, context_tokens: int, num_prompt_tokens: int
    ) -> Self:
        """Makes the ledger of a request whose context would else be compressed by `rule`."""
        own = replace(
            rule,
            at_prompt_end=True,
            chunk_tokens=None,
            decode_tokens=None,
            pressure_mark=None,
            window_size=0,
            window_blocks=0,
        )
        return cls(
            num_prompt_tokens,
            own,
            policy,
            num_prompt_tokens=num_prompt_tokens,
            context_tokens=context_tokens,
        )

    def max_prefix_hit(self, num_tokens: int) -> int:
        """Returns the longest usable hit, which leaves every query that scores the context."""
        return self.scored_from - 1

    @property
    def scored_from(self) -> int:
        """Start of the first chunk that scores the context, at least two tokens from the end.

        A lone token would look like a generated one, and its query would not be seen where a CUDA
        graph is replayed.
        """
        return min(self.context_tokens, self.num_prompt_tokens - 2)

    def chunk(self, start: int, num_tokens: int) -> int:
        """Limits the next `num_tokens` to those read together, so that no lone token is left."""
        if start < self.scored_from:
            return min(num_tokens, self.scored_from - start)
        leaves_one = start + num_tokens == self.num_prompt_tokens - 1
        return num_tokens - (leaves_one and num_tokens > 2)

    def follows_first_token(self, position: int) -> bool:
        """Says no: the request ends with its first token, and leaves the event's state."""
        return False

    def end_of_event(self, position: int) -> int:
        """Returns the end of the context."""
        return self.context_tokens

    def decide(self, position: int, under_pressure: bool = False) -> Decision | None:
        """Decides at the prompt's end what happens to the context; elsewhere nothing does."""
        if position != self.compress_at:
            return None
        end = self.context_tokens
        decision = RequestLedger(end, self.rule, protected=self.protected).decide(end)
        return None if decision is None else replace(decision, trigger=TRIGGER_PREPARE)

    def commit(self, position: int, num_kept_blocks: int) -> None:
        """Records the event at the context's end, where later requests begin with it."""
        super().commit(self.context_tokens, num_kept_blocks)
