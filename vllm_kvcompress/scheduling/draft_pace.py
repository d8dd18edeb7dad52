"""Draft pace: how many tokens a batch drafts, by what is accepted and by what steps take.

cycle     [ draft ][ draft ] ... [ draft ][ one step verifies all, and samples one more ]
tokens    1 if the first draft is rejected, ... and 1 more than was drafted if none is
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

MAX_DRAFTS = 7  # with the token behind them a step verifies 8 queries of a request
CHOICES = (0, 1, 3, MAX_DRAFTS)
_MEASURED = 2  # cycles that are timed of each choice, before choices are compared
_PROBED_FIRST = 8  # cycles after which some choice is timed again; twice as many each time,
_PROBED_EVERY = 64  # up to these
_NEW = 0.2  # weight of a new duration
_NEW_SHORTER = 0.5  # of one that is shorter than the former ones
_KEPT = 0.95  # weight of a request's former drafts when new ones have been verified
_EXPECTED = (8.0, 10.0)  # accepted and verified drafts that a request begins with


@dataclass
class _Costs:
    """What cycles of batches of about the same size took.

    Attributes:
        seconds: by number of drafts, seconds of a cycle.
        counts: how many cycles were timed.
        cycles: cycles since a choice was last timed again.
        probes: how often one was.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=lambda: dict.fromkeys(CHOICES, 0))
    cycles: int = 0
    probes: int = 0

    def note(self, num_drafts: int, seconds: float) -> None:
        """Takes the shorter one of the first two, which may have compiled, then a mean.

        Shorter ones count more in it, since a machine's other work only makes cycles longer.
        """
        former, few = self.seconds.get(num_drafts, seconds), self.counts[num_drafts] < _MEASURED
        new = _NEW_SHORTER if seconds < former else _NEW
        mean = (1 - new) * former + new * seconds
        self.seconds[num_drafts] = min(former, seconds) if few else mean
        self.counts[num_drafts] += 1


class DraftPace:
    """Chooses the number of drafts with the most expected tokens per second.

    Durations are measured on the engine's own cycles, of each choice, from fewer drafts to more,
    for batches of about as many requests and tokens. A choice with more drafts is not tried where
    the one before would not pay if all of its drafts were accepted. Now and then one cycle times
    another choice again, since a machine's other work may have slowed the former ones.
    """

    def __init__(self) -> None:
        self._costs: dict[tuple[int, int], _Costs] = {}
        self._accepted: dict[str, tuple[float, float]] = {}

    def note_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Records how many of a request's drafts were accepted; those behind count as untried."""
        accepted, tried = self._accepted.get(request_id, _EXPECTED)
        tried = _KEPT * tried + min(num_drafts, num_accepted + 1)
        self._accepted[request_id] = (_KEPT * accepted + num_accepted, tried)

    def note_cycle(
        self, num_requests: int, num_tokens: int, num_drafts: int, seconds: float
    ) -> None:
        """Records how long a batch, of `num_tokens` tokens in all, took to draft and verify."""
        if num_drafts in CHOICES:
            self._costs_of(num_requests, num_tokens).note(num_drafts, seconds)

    def forget(self, request_id: str) -> None:
        """Drops a request; ignores unknown ones."""
        self._accepted.pop(request_id, None)

    def choose(self, request_ids: list[str], num_tokens: int) -> int:
        """Returns how many tokens each of these requests drafts; 0: drafting does not pay."""
        costs = self._costs_of(len(request_ids), num_tokens)
        costs.cycles += 1
        worth = self._worth_trying(costs)
        untried = [number for number in worth if costs.counts[number] < _MEASURED]
        if untried:
            return untried[0]
        rates = {number: self.expected(request_ids, number) for number in worth}
        best = max(worth, key=lambda number: rates[number] / costs.seconds[number])
        if costs.cycles < min(_PROBED_EVERY, _PROBED_FIRST << costs.probes):
            return best
        costs.cycles, costs.probes = 0, costs.probes + 1
        return CHOICES[costs.probes % min(len(CHOICES), len(worth) + 1)]

    def expected(self, request_ids: list[str], num_drafts: int) -> float:
        """Returns the expected tokens of a cycle, if every draft is accepted equally often."""
        total = 0.0
        for request_id in request_ids:
            accepted, tried = self._accepted.get(request_id, _EXPECTED)
            rate = accepted / tried
            total += sum(rate**number for number in range(num_drafts + 1))
        return total

    def _worth_trying(self, costs: _Costs) -> list[int]:
        """Returns the choices up to the first that has not been timed, or could not pay."""
        worth = [0]
        for former, number in pairwise(CHOICES):
            if costs.counts[former] < _MEASURED:
                break
            if former and costs.seconds[former] > (former + 1) * costs.seconds[0]:
                return worth[:-1]
            worth.append(number)
        return worth

    def _costs_of(self, num_requests: int, num_tokens: int) -> _Costs:
        """Returns the costs of batches whose sizes have as many binary digits."""
        key = (num_requests.bit_length(), num_tokens.bit_length())
        return self._costs.setdefault(key, _Costs())
