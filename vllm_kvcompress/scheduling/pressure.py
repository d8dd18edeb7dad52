"""Whom to compress when the pool is nearly full: pure arithmetic on block counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEAST_GAIN = 8  # a request is compressed only if that gives back at least its 8th part
# Until an event's sources are back: its own step, one that asynchronous scheduling has planned
# meanwhile, and the one that frees them.
STEPS_UNTIL_FREED = 3


@dataclass(frozen=True)
class Candidate:
    """A request that could be compressed now.

    Attributes:
        request_id: vLLM's.
        sources: blocks that its event would read, and give back once it has run.
        written: fresh blocks that the event needs meanwhile.
    """

    request_id: str
    sources: int
    written: int

    @property
    def gain(self) -> int:
        """Blocks that are free afterwards, and are not now."""
        return self.sources - self.written

    @property
    def is_worth_it(self) -> bool:
        """Whether it gives back enough to be worth the loss of tokens."""
        return self.gain * LEAST_GAIN >= self.sources


@dataclass(frozen=True)
class Pool:
    """What the block pool looks like before a step.

    Attributes:
        size: blocks that can be used.
        free: of them, free ones.
        pending_frees: blocks that events which have run give back in this step.
        reserved: blocks that the running requests are going to take.
        growth: blocks that they may take in one step.
        needed_until_freed: blocks that they do take before an event that runs now has given its
            sources back.
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

    def shortage(self, mark: float, least_written: int) -> int:
        """Blocks that are missing below the mark, for the running requests, or the waiting one.

        The running ones need what is reserved, and room for an event: once there is none left,
        nobody can be compressed any more.
        """
        above = int(self.size - mark * self.size)
        running = self.reserved + self.growth + least_written
        return max(above, running, self.wanted) - self.free - self.pending_frees


def choose(candidates: Iterable[Candidate], shortage: int, room: int) -> list[Candidate]:
    """The requests to compress: those that give back most first, until nothing is missing.

    Args:
        candidates: requests that generate, and are worth it.
        shortage: blocks that are missing.
        room: free blocks for what events write.
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
