"""Compression rule: budget and triggers as arithmetic on token positions and block counts.

Scheduler and workers derive everything from the same rule and the same positions, so they never
have to agree after the fact.

Blocks are those that attention kernels see: vLLM's own or, beside states of Mamba layers, where
these are hundreds of tokens, `split` equal parts of each. What is allocated and freed is whole
blocks of vLLM's:

    vLLM's blocks   [ 0               ][ 1               ][ 2               ]     split = 4
    parts           [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ][ 8 ][ 9 ][.. ][   ]
    event           [ sources: parts 0 .. 9                          ][ tail: part 10, partial
    afterwards      0 and 1 are freed; 8 and 9, compressed but beside the tail, take kept tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_kvcompress.rounding import ceil_div

TRIGGER_PROMPT = "prompt"
TRIGGER_CHUNK = "chunk"
TRIGGER_DECODE = "decode"
TRIGGER_PRESSURE = "pressure"
TRIGGER_PREPARE = "prepare"  # no setting: a request asks for it
TRIGGER_CEILING = "ceiling"  # a setting of its own
TRIGGER_REASONING = "reasoning"  # likewise
CEILING_SHARE = 8  # an event at the ceiling makes room for an eighth of it


@dataclass(frozen=True, kw_only=True)
class PolicyDemand:
    """The needs of a policy that the rule which plans its events has to meet.

    Attributes:
        window_size: last queries that the policy observes at an event.
        min_window: how many of them are enough behind a prefix-cache hit; None: all.
        least_blocks: blocks that an event leaves at least: one page per layer and head, and room
            for the policy state.
        window_blocks: blocks of vLLM's for a request's last queries, under memory pressure.
        blocks_on_top: blocks of a policy state that does not count in the budget.
        layer_dependent: whether layers get different budgets.
        state_share: part of kept blocks that numbers of each token take.
        num_certain: first and last tokens that every head has to keep, whatever its budget; 0:
            small budgets cut what the policy protects.
    """

    window_size: int = 0
    min_window: int | None = None
    least_blocks: int = 1
    window_blocks: int = 0
    blocks_on_top: int = 0
    layer_dependent: bool = False
    state_share: float = 0.0
    num_certain: int = 0

    @property
    def needed_queries(self) -> int:
        """Fewest last queries that a prefix-cache hit has to leave before an event."""
        fewest = self.window_size if self.min_window is None else self.min_window
        return min(fewest, self.window_size)


@dataclass(frozen=True)
class CompressionRule(PolicyDemand):
    """Budget and triggers of a request, in tokens and blocks.

    The parameter `compress_at` of methods is the end of the prompt, or of the context that a
    request names: tokens behind it count as generated.

    Attributes:
        block_size: tokens of a block.
        fraction: kept fraction of the logical tokens, or None.
        tokens: kept tokens per head, or None. Exactly one of the two is set.
        at_prompt_end: whether to compress when the last prompt token has been computed.
        chunk_tokens: interval in prompt tokens at which to compress, and, unless `decode_tokens`
            is set, in generated tokens; a multiple of the block size, or None.
        decode_tokens: interval in generated tokens at which to compress, or None.
        pressure_mark: used part of the pool above which requests that generate are compressed, as
            they are when others wait for room; None: no compression under memory pressure.
        min_tokens: logical tokens below which a request is not compressed.
        ceiling_blocks: most blocks of vLLM's that a request holds after a step, whatever the
            triggers say; None: as many as these leave.
        after_reasoning: part of what is not protected that is kept once a model has ended its
            reasoning; None: the end of reasoning is no event.
        span_share: part of protected spans that every head keeps; None: as much of them as of all
            tokens, for which there is always room.
        split: blocks in one of vLLM's.
        leaves_states: whether others go on from what a request leaves: then its kept tokens fill
            blocks of their own, and none lie beside the tail.
    """

    block_size: int
    fraction: float | None = None
    tokens: int | None = None
    at_prompt_end: bool = True
    chunk_tokens: int | None = None
    decode_tokens: int | None = None
    pressure_mark: float | None = None
    min_tokens: int = 0
    ceiling_blocks: int | None = None
    after_reasoning: float | None = None
    span_share: float | None = 1.0
    split: int = 1
    leaves_states: bool = False

    @property
    def allocated_size(self) -> int:
        """Tokens of a block of vLLM's."""
        return self.block_size * self.split

    def num_fresh(self, num_kept: int, end_block: int) -> int:
        """Counts the blocks of vLLM's that an event allocates to keep `num_kept` blocks.

        Its last source, if it ends at `end_block` within one of vLLM's, stays with the tail, so
        that its compressed part has room. Layers that get different budgets do not use this, since
        a layer cannot take the pages of another that is still to be read.
        """
        has_room = not (self.layer_dependent or self.leaves_states)
        room = end_block % self.split if has_room else 0
        return ceil_div(max(0, num_kept - room), self.split)

    def num_beside_tail(self, num_kept: int, end_block: int) -> int:
        """Counts the kept blocks for which an event allocates nothing; see `num_fresh`."""
        return max(0, num_kept - self.num_fresh(num_kept, end_block) * self.split)

    @property
    def keeps_all(self) -> bool:
        """Whether requests of any length stay uncompressed."""
        if self.ceiling_blocks is not None or self.after_reasoning is not None:
            return False
        return self.fraction is not None and self.fraction >= 1.0

    @property
    def reserves_growth(self) -> bool:
        """Whether requests are admitted only if what running ones grow to fits beside them.

        Memory pressure makes room for growth by itself.
        """
        return self.ceiling_blocks is not None and self.pressure_mark is None

    def limited(self, num_blocks: int) -> int:
        """Returns a number of vLLM's blocks, or the ceiling if that is less."""
        return num_blocks if self.ceiling_blocks is None else min(num_blocks, self.ceiling_blocks)

    def next_position(self, compress_at: int, after: int) -> int | None:
        """Finds the first position > `after`, in computed tokens, at which an event may happen."""
        candidates = []
        if self.chunk_tokens and after < compress_at:
            boundary = (after // self.chunk_tokens + 1) * self.chunk_tokens
            candidates.append(min(boundary, compress_at))
        elif self.at_prompt_end and after < compress_at:
            candidates.append(compress_at)
        stride = self.decode_tokens or self.chunk_tokens
        if stride:
            generated = max(0, after - compress_at)
            candidates.append(compress_at + (generated // stride + 1) * stride)
        return min(candidates, default=None)

    def is_position(self, compress_at: int, position: int) -> bool:
        """Whether an event may happen when `position` tokens have been computed."""
        return self.next_position(compress_at, position - 1) == position

    def trigger_at(self, compress_at: int, position: int) -> str:
        """Returns the name of the trigger that fires at an event position."""
        if position == compress_at and (self.at_prompt_end or self.chunk_tokens):
            return TRIGGER_PROMPT if self.at_prompt_end else TRIGGER_CHUNK
        if position < compress_at or not self.decode_tokens:
            return TRIGGER_CHUNK
        return TRIGGER_DECODE

    def target_blocks(self, compress_at: int, position: int) -> int:
        """Counts the blocks that a request's full blocks are compressed to.

        While a prompt is being read a fraction counts from all of it, so that its beginning is not
        compressed more than its end; afterwards it counts from all tokens so far.
        """
        num_full_blocks = max(compress_at, position) // self.block_size
        if self.fraction is not None:
            wanted = math.ceil(round(self.fraction * num_full_blocks, 6))
        else:
            assert self.tokens is not None
            wanted = math.ceil(self.tokens / self.block_size)
        return self._kept(wanted + self.blocks_on_top)

    def blocks_after_reasoning(self, num_protected: int, num_others: int) -> int:
        """Counts the blocks that protected tokens and a part of the others are compressed to."""
        assert self.after_reasoning is not None
        num_kept = num_protected + math.ceil(round(self.after_reasoning * num_others, 6))
        fewest = ceil_div(num_protected, self.block_size) + 1  # the policy chooses a block at least
        num_blocks = max(fewest, ceil_div(num_kept, self.block_size))
        return self._kept(math.ceil(num_blocks / (1 - self.state_share)) + self.blocks_on_top)

    def _kept(self, num_blocks: int) -> int:
        """Limits the blocks that an event keeps, by what the policy needs and by the ceiling."""
        wanted = max(self.least_blocks, num_blocks)
        if self.ceiling_blocks is not None:
            wanted = min(wanted, kept_below(self.ceiling_blocks) * self.split)
        return wanted

    def has_room(self, num_blocks: int, num_protected: int) -> bool:
        """Whether kept blocks hold what is kept of protected tokens, and at least a block more.

        Tokens that every head has to keep need no more.
        """
        num_kept = num_kept_of_spans(self.span_share, num_protected)
        room = math.floor(num_blocks * (1 - self.state_share))
        if ceil_div(self.num_certain, self.block_size) > room:
            return False
        return not num_kept or math.ceil(num_kept / self.block_size) < room

    def first_effective_position(self, num_prompt_tokens: int) -> int | None:
        """Returns the first position up to the prompt's end at which an event frees blocks."""
        last = num_prompt_tokens
        if self.ceiling_blocks is not None:
            last = min(last, self.ceiling_blocks * self.allocated_size)
        position = self.next_position(num_prompt_tokens, 0)
        while position is not None and position <= last:
            target = self.target_blocks(num_prompt_tokens, position)
            num_fresh = self.num_fresh(target, position // self.block_size)
            if position >= self.min_tokens and num_fresh < position // self.allocated_size:
                return position
            position = self.next_position(num_prompt_tokens, position)
        reaches_ceiling = self.ceiling_blocks == last // self.allocated_size
        return last if reaches_ceiling else None

    def max_prefix_hit(self, num_prompt_tokens: int) -> int:
        """Returns the longest usable prefix-cache hit, in tokens.

        A hit leaves no queries behind, so those that the first event needs must be computed anew,
        and at least one token, so that a step ends at the event.
        """
        position = self.first_effective_position(num_prompt_tokens)
        if position is None and self.pressure_mark is not None:
            position = num_prompt_tokens  # from then on an event may come at any token
        if position is None:
            return num_prompt_tokens - 1
        return max(0, min(num_prompt_tokens - 1, position - max(1, self.needed_queries)))

    def peak_blocks(self, num_tokens: int) -> int:
        """Counts the most of vLLM's blocks that up to `num_tokens` tokens hold at once."""
        size = self.allocated_size
        num_blocks = math.ceil(num_tokens / size)
        kept = min(ceil_div(self.target_blocks(num_tokens, num_tokens), self.split), num_blocks)
        peak = num_blocks + kept
        if self.chunk_tokens:
            stride = max(self.chunk_tokens, self.decode_tokens or 0)
            # kept + chunk + fresh; one more chunk while a step's sources are not yet freed. Before
            # the first event nothing is kept, but all tokens up to `min_tokens` are there.
            before = max(kept, math.ceil(self.min_tokens / size))
            bounded = before + kept + 2 * math.ceil(stride / size) + 2
            peak = min(peak, bounded)
        if self.ceiling_blocks is not None:
            # At its first event a request holds the ceiling and what is kept of it; as much again
            # as that frees comes while a step's sources are not yet freed.
            peak = min(peak, 2 * self.ceiling_blocks + 1)
        return peak

    def admission_blocks(self, num_tokens: int) -> int:
        """Counts the free blocks of vLLM's that are needed to read all of `num_tokens` tokens."""
        if self.first_effective_position(num_tokens) is None:
            return math.ceil(num_tokens / self.allocated_size) + self.window_blocks
        return self.peak_blocks(num_tokens) + self.window_blocks

    def held_blocks(self, num_tokens: int) -> int:
        """Counts the blocks of vLLM's that `num_tokens` tokens hold between events.

        These are kept blocks and a tail: a partial block, or what is computed up to the next event.
        """
        num_blocks = math.ceil(num_tokens / self.allocated_size)
        if self.first_effective_position(num_tokens) is None and self.pressure_mark is None:
            return num_blocks
        tail = self.decode_tokens or self.chunk_tokens
        if tail or self.ceiling_blocks is None:
            kept = ceil_div(self.target_blocks(num_tokens, num_tokens), self.split)
            num_blocks = min(num_blocks, kept + math.ceil((tail or 1) / self.allocated_size))
        return self.limited(num_blocks) + self.window_blocks

    def concurrency(self, num_tokens: int, pool_blocks: int) -> float:
        """Returns how many requests of `num_tokens` tokens a pool serves at a time.

        All but one are compressed, and the last one has room to be read.
        """
        waiting = pool_blocks - self.admission_blocks(num_tokens)
        if waiting < 0:
            return pool_blocks / self.admission_blocks(num_tokens)
        return 1 + waiting / self.held_blocks(num_tokens)


def num_kept_of_spans(share: float | None, num_protected: int) -> int:
    """Counts the protected tokens that every head keeps for certain: `span_share` of them."""
    return 0 if share is None else math.ceil(round(share * num_protected, 6))


def kept_below(ceiling_blocks: int) -> int:
    """Counts the blocks that an event keeps where a request has reached its ceiling.

    The rest, an eighth and at least a block, is room until the next event. An event reads all that
    is held, so per token it costs as much as reading eight tokens, whatever the ceiling; and a
    request holds 15/16 of its ceiling in the mean.
    """
    return ceiling_blocks - max(1, ceiling_blocks // CEILING_SHARE)
