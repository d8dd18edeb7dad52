"""Copies of kept states in host memory: which of its blocks hold which state, and for how long.

Workers copy (`worker_side/step.py`); this says what and where. A copy stays valid when its state is
back in the pool, since nothing writes to the blocks of a state. So a state that leaves the pool
once more is not copied again.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from vllm_kvcompress.errors import InvariantError


@dataclass
class HostCopy:
    """Copy of one state.

    Attributes:
        number: number of the state.
        found_by: hash under which it is kept.
        num_tokens: tokens that it stands for.
        slots: host blocks, one per block of the state.
        block_ids: blocks of the pool that the workers' page table of the state names.
    """

    number: int
    found_by: Hashable
    num_tokens: int
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]


class HostCopies:
    """Copies by state number, the least recently used first.

    Attributes:
        num_slots: host blocks.
        slot_bytes: bytes of one, over all layers and ranks.
        num_tokens: tokens that the copied states stand for.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_tokens = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._copies: dict[int, HostCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[HostCopy]:
        """Iterates over a snapshot, the least recently used copy first."""
        return iter(list(self._copies.values()))

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return (self.num_slots - self.num_free) * self.slot_bytes

    def use(self, number: int) -> HostCopy | None:
        """Returns a state's copy, and makes it the most recently used; None: there is none."""
        copy = self._copies.pop(number, None)
        if copy is not None:
            self._copies[number] = copy
        return copy

    def add(
        self, number: int, found_by: Hashable, num_tokens: int, block_ids: tuple[int, ...]
    ) -> HostCopy:
        """Takes host blocks for a state that has no copy; as many as it has blocks must be free."""
        count = len(block_ids)
        slots = tuple(self._free[-count:])
        del self._free[-count:]
        self.num_tokens += num_tokens
        copy = self._copies[number] = HostCopy(number, found_by, num_tokens, slots, block_ids)
        return copy

    def drop(self, number: int) -> None:
        """Frees a state's host blocks; ignores states without a copy."""
        copy = self._copies.pop(number, None)
        if copy is not None:
            self.num_tokens -= copy.num_tokens
            self._free += reversed(copy.slots)

    def check_integrity(self, numbers: set[int]) -> None:
        """Checks that every host block is free or one state's, and that these states are kept.

        Raises:
            InvariantError: otherwise.
        """
        used = itertools.chain.from_iterable(copy.slots for copy in self._copies.values())
        slots = sorted([*used, *self._free])
        if slots != list(range(self.num_slots)):
            raise InvariantError(
                f"host blocks: expected each of {self.num_slots} free or used once, found {slots}."
            )
        if unknown := set(self._copies) - numbers:
            raise InvariantError(f"host copies: expected those of kept states, found {unknown}.")
