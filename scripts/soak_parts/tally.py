"""What a long run has seen so far: counted, written to a file after every batch, and summed up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MOST_PROBLEMS = 20  # that are told
MOST_GROWTH = 0.05  # of a server's memory, over the second half of its turn


@dataclass
class Tally:
    """Counts over all turns.

    Attributes:
        key: what the schedule depends on; a file with another one is not gone on with.
        first: the first request's number.
        done: requests that have come to their end.
        seconds: that these took.
        outcomes: answered, refused, cut.
        counts: steps, events and the like, by name.
        by_setup: requests.
        problems: sentences that begin with the number of the request.
        growth: by turn, its server's memory at its end over that in its middle, less 1.
    """

    key: str
    first: int
    done: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    by_setup: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    growth: list[float] = field(default_factory=list)

    @property
    def next_index(self) -> int:
        """The request to go on with."""
        return self.first + self.done

    def save(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(vars(self), indent=1))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, key: str, first: int) -> Tally:
        """That of a run that was stopped, or a new one."""
        if path.exists():
            found = json.loads(path.read_text())
            if found["key"] == key and found["first"] == first:
                counted = ("outcomes", "counts", "by_setup")
                return cls(**{k: Counter(v) if k in counted else v for k, v in found.items()})
        return cls(key, first)

    def see_memory(self, samples: list[int]) -> None:
        """Takes a turn's memory, after each of its batches."""
        half = samples[len(samples) // 2 :]
        if len(half) > 1:
            self.growth.append(half[-1] / half[0] - 1)

    def growing(self) -> list[str]:
        """Turns in which memory grew too much."""
        return [f"{growth:.1%}" for growth in self.growth if growth > MOST_GROWTH]

    def passed(self, requests: int) -> bool:
        """Whether all ran, and all is well."""
        return self.done >= requests and not self.problems and not self.growing()

    def summary(self, requests: int, command: str) -> str:
        """A table."""
        rows = [("requests", f"{self.done} of {requests}"), ("minutes", f"{self.seconds / 60:.1f}")]
        rows += [(name, str(count)) for name, count in sorted(self.outcomes.items())]
        rows += [(name, str(count)) for name, count in sorted(self.counts.items())]
        rows += [(f"on {name}", str(count)) for name, count in sorted(self.by_setup.items())]
        if self.growth:
            rows.append(("memory, most growth of a turn", f"{max(self.growth):.2%}"))
        rows.append(("problems", str(len(self.problems))))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += [f"PROBLEM {each}" for each in self.problems[:MOST_PROBLEMS]]
        lines += [f"PROBLEM memory grew by {each} in a turn" for each in self.growing()]
        verdict = "passed" if self.passed(requests) else "NOT passed"
        return "\n".join([*lines, f"{verdict}; again: {command}"])
