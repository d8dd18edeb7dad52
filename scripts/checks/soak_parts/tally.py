"""Counts of a soak run so far, saved after every batch, and their summary."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from soak_parts import memory
from soak_parts.setups import SETUPS

MAX_SHOWN_PROBLEMS = 20  # that are told
MIN_STORM_REQUESTS = 100  # requests, among which one is preempted


@dataclass
class Tally:
    """Counts over all turns of a run.

    Attributes:
        key: what the schedule depends on; a file with another one is not gone on with.
        first: the first request's number.
        done: requests that have come to their end.
        seconds: that these took.
        outcomes: answered, refused, cut.
        counts: steps, events and the like, by name.
        by_setup: requests.
        problems: sentences that begin with the number of the request.
        preempted: by setup, how often.
        slopes: by setup and turn, bytes by which its server's memory grows in 1,000 requests, and
            the standard error of that.
    """

    key: str
    first: int
    done: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    by_setup: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    preempted: Counter[str] = field(default_factory=Counter)
    slopes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def next_index(self) -> int:
        """The index of the next request."""
        return self.first + self.done

    def save(self, path: Path) -> None:
        """Writes the tally to a file, atomically."""
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(vars(self), indent=1))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, key: str, first: int) -> Tally:
        """Reads the tally of a stopped run, or makes a new one."""
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["key"] == key and saved["first"] == first:
                for name in ("outcomes", "counts", "by_setup", "preempted"):
                    saved[name] = Counter(saved[name])
                return cls(**saved)
        return cls(key, first)

    def see_memory(self, setup: str, samples: list[tuple[int, int]]) -> None:
        """Takes a turn's memory: requests so far and bytes, after each of its batches."""
        if (slope := memory.slope(samples)) is not None:
            self.slopes.setdefault(setup, []).append(slope)

    def wrong(self) -> list[str]:
        """Returns all problems, those of whole turns included."""
        problems = list(self.problems)
        for setup in SETUPS:
            asked = self.by_setup[setup.name]
            if setup.storms and asked >= MIN_STORM_REQUESTS and not self.preempted[setup.name]:
                problems.append(f"{setup.name}: none of {asked} requests was preempted")
        for name, slopes in self.slopes.items():
            if memory.grows(mean := memory.mean_slope(slopes)):
                problems.append(f"{name}: memory grows by {_told(mean)}")
        return problems

    def passed(self, requests: int) -> bool:
        """Returns whether all requests ran without a problem."""
        return self.done >= requests and not self.wrong()

    def summary(self, requests: int, command: str) -> str:
        """Returns a table of the counts, the problems and the verdict."""
        rows = [("requests", f"{self.done} of {requests}"), ("minutes", f"{self.seconds / 60:.1f}")]
        rows += [(name, str(count)) for name, count in sorted(self.outcomes.items())]
        rows += [(name, str(count)) for name, count in sorted(self.counts.items())]
        rows += [(f"on {name}", str(count)) for name, count in sorted(self.by_setup.items())]
        often = sorted((+self.preempted).items())
        rows += [(f"preempted on {name}", str(count)) for name, count in often]
        for name, slopes in sorted(self.slopes.items()):
            rows.append((f"memory on {name}", _told(memory.mean_slope(slopes))))
        wrong = self.wrong()
        rows.append(("problems", str(len(wrong))))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += [f"PROBLEM {each}" for each in wrong[:MAX_SHOWN_PROBLEMS]]
        verdict = "passed" if self.passed(requests) else "NOT passed"
        return "\n".join([*lines, f"{verdict}; again: {command}"])


def _told(slope_and_error: tuple[float, float]) -> str:
    slope, error = slope_and_error
    return f"{slope / 2**10:.0f} KiB for 1,000 requests, +- {error / 2**10:.0f}"
