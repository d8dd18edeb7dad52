"""Memory pressure: which requests are compressed when the block pool is nearly full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIN_GAIN_SHARE = 8  # a request is compressed only if that frees at least an eighth of its blocks
# Until an event's sources are free: its own step, one that asynchronous scheduling has planned
# meanwhile, and the one that frees them.
STEPS_UNTIL_FREED = 3


@dataclass(frozen=True)
class Candidate:
    """Request that could be compressed now.

    Attributes:
        request_id: vLLM's request id.
        sources: blocks that its event would read, and free once it has run.
        written: fresh blocks that the event needs meanwhile.
    """

    request_id: str
    sources: int
    written: int

    @property
    def gain(self) -> int:
        """Blocks that are free afterwards and are not now."""
        return self.sources - self.written

    @property
    def is_worth_it(self) -> bool:
        """Whether it frees enough to be worth the loss of tokens."""
        return self.gain * MIN_GAIN_SHARE >= self.sources


@dataclass(frozen=True)
class Pool:
    """Block pool before a step, in blocks.

    Attributes:
        size: usable blocks.
        free: free blocks.
        pending_frees: blocks that this step frees, of events that have run.
        reserved: blocks that the running requests are going to take.
        growth: blocks that they may take in one step.
        needed_until_freed: blocks that they take before an event that runs now has freed its
            sources.
        wanted: blocks that the first waiting request needs; 0: none waits for blocks.
    """

    size: int
    free: int
    pending_frees: int
    reserved: int
    growth: int
    needed_until_freed: int
    wanted: int

    @property
    def room(self) -> int:
        """Free blocks for what events write."""
        return self.free - self.needed_until_freed

    def shortage(self, mark: float, min_written: int) -> int:
        """Counts the missing blocks: below the mark, for running requests, or for a waiting one.

        Running requests need what is reserved and room for an event: once there is none left, no
        request can be compressed any more.
        """
        above_mark = int(self.size - mark * self.size)
        running = self.reserved + self.growth + min_written
        return max(above_mark, running, self.wanted) - self.free - self.pending_frees


def choose(candidates: Iterable[Candidate], shortage: int, room: int) -> list[Candidate]:
    """Chooses requests to compress, largest gain first, until `shortage` blocks are gained.

    Events write no more than `room` blocks together.
    """
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (-c.gain, c.written, c.request_id)):
        if shortage <= 0:
            break
        if candidate.written <= room:
            chosen.append(candidate)
            room -= candidate.written
            shortage -= candidate.gain
    return chosen
