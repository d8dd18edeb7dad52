"""When a request is compressed, down to how many blocks, and what it holds meanwhile.

logical tokens   0 ............ c*bs ............ F*bs ... e
resident         [ kept blocks ][ full tail blocks ][partial]
event at e       sources: kept + tail blocks  ->  K fresh blocks; the partial block stays
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

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
        context_key: stands for the named context and how it is compressed, where that may be
            kept for later requests.
    """

    compress_at: int
    rule: CompressionRule
    policy: str = ""
    compressed_blocks: int = 0
    resident_blocks: int = 0
    last_position: int = 0
    first_event_position: int | None = None
    num_prompt_tokens: int = 0
    context_key: Hashable = None

    def adopt(self, end_block: int, num_kept_blocks: int) -> None:
        """Records a context that an earlier request had compressed, instead of an event."""
        self.commit(end_block * self.rule.block_size, num_kept_blocks)

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
