"""When a request is compressed, down to how many blocks, and what it holds meanwhile.

logical tokens   0 ............ c*bs ............ F*bs ... e
resident         [ kept blocks ][ full tail blocks ][partial]
event at e       sources: kept + tail blocks  ->  K fresh blocks; the partial block stays
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_kvcompress.scheduling.plan import Observation
from vllm_kvcompress.scheduling.rule import TRIGGER_PRESSURE, CompressionRule

SKIP_SHORT = "shorter_than_min_tokens"
SKIP_NOTHING_TO_FREE = "nothing_to_free"
SKIP_ERROR = "error"


@dataclass(frozen=True)
class Decision:
    """What the rule says at a position: an event down to `num_kept_blocks`, or a reason why not."""

    trigger: str
    num_kept_blocks: int
    skipped: str | None = None


@dataclass
class RequestLedger:
    """The bookkeeping of one request.

    Attributes:
        compress_at: logical tokens of the prompt; of its context, where the request names one
            that is compressed before the rest is read (the rest then counts as generated).
        rule: when and how far this request is compressed.
        policy: what with; see `policies`.
        compressed_blocks: logical full blocks that have been compressed (c above).
        resident_blocks: fresh blocks that hold what is left of them.
        last_position: position of the last event (0: none yet).
        first_event_position: position of the first event; later tokens depend on it.
        num_prompt_tokens: logical tokens of the whole prompt, behind a named context, too.
    """

    compress_at: int
    rule: CompressionRule
    policy: str = ""
    compressed_blocks: int = 0
    resident_blocks: int = 0
    last_position: int = 0
    first_event_position: int | None = None
    num_prompt_tokens: int = 0

    def adopt(self, position: int, num_kept_blocks: int) -> None:
        """Records the last event of an earlier request, whose state this one begins with."""
        self.commit(position, num_kept_blocks)

    def usable_tokens(self, position: int, num_tokens: int) -> int:
        """Tokens of a kept state that this request can begin with; 0: none.

        The queries that the next event observes have to be computed anew, since nobody has kept
        them; and none of the tokens that the state's last event saw.

        Args:
            position: of the state's last event.
            num_tokens: that both have in common, at least up to there.
        """
        after = replace(self, last_position=position)
        while num_tokens >= position:
            at = self.rule.next_position(self.compress_at, num_tokens)
            if self.rule.pressure_mark is not None:  # from the prompt's end on at any token
                at = min(at or self.num_prompt_tokens, self.num_prompt_tokens)
            if at is None:
                return num_tokens
            limit = at - after.observed_window(at)
            if num_tokens <= limit:
                return num_tokens
            num_tokens = limit
        return 0

    @property
    def max_prefix_hit(self) -> int | None:
        """Longest usable prefix-cache hit in tokens, within the context; None: it names none."""
        if self.compress_at < self.num_prompt_tokens:
            return self.rule.max_prefix_hit(self.compress_at)
        return None

    def decide(self, position: int, under_pressure: bool = False) -> Decision | None:
        """What happens when `position` tokens have been computed; None: no trigger fires.

        Args:
            position: in computed tokens.
            under_pressure: room is needed, and this request was selected.
        """
        if self.rule.is_position(self.compress_at, position):
            trigger = self.rule.trigger_at(self.compress_at, position)
        elif under_pressure:
            trigger = TRIGGER_PRESSURE
        else:
            return None
        num_kept = self.rule.target_blocks(self.compress_at, position)
        if position < self.rule.min_tokens:
            return Decision(trigger, num_kept, SKIP_SHORT)
        if num_kept >= self.num_source_blocks(position):
            return Decision(trigger, num_kept, SKIP_NOTHING_TO_FREE)
        return Decision(trigger, num_kept)

    def num_source_blocks(self, position: int) -> int:
        """Blocks that an event at a position reads: kept ones, and full ones since."""
        return self.resident_blocks + position // self.rule.block_size - self.compressed_blocks

    def end_of_event(self, position: int) -> int:
        """Tokens whose full blocks an event at a position compresses."""
        return position

    def observed_window(self, position: int) -> int:
        """Queries that an event at `position` observes.

        Never older than the last event (what they attended to is gone), and after the prompt
        never prompt tokens (a prefix-cache hit would leave them without queries; under the
        pressure trigger it does not).
        """
        oldest = self.last_position
        if position > self.compress_at and self.rule.pressure_mark is None:
            oldest = max(oldest, self.compress_at)
        return min(self.rule.window_size, position - oldest)

    def commit(self, position: int, num_kept_blocks: int) -> None:
        """Records an event."""
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
        position = self.rule.next_position(self.compress_at, start)
        if position is None:
            return None
        first = max(start, position - self.rule.window_size)
        if first >= end:
            return None
        return Observation(first - start, first, min(end, position) - first)

    def resident_tokens(self, num_tokens: int) -> int:
        """Resident tokens per head (mean over heads and layers) at `num_tokens` logical ones."""
        num_tail_tokens = num_tokens - self.compressed_blocks * self.rule.block_size
        return self.resident_blocks * self.rule.block_size + num_tail_tokens
