"""Times several functions in turns, so that a change of the machine's speed meets all of them alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

# Idle time before each turn. A thread pool may keep spinning for some milliseconds after a call,
# and would take processor time from the next function.
SETTLE_S = 0.02
# A call shorter than this is repeated within its turn, after one call that is not counted: the caches and the
# wakefulness of threads are then those that its own previous call left.
SHORT_S = 0.05


@dataclasses.dataclass
class Candidate:
    """A function that returns when its result is there."""

    name: str
    call: Callable[[], object]
    samples: list[float] = dataclasses.field(default_factory=list)
    turns: dict[int, float] = dataclasses.field(default_factory=dict)  # median of each turn, in seconds

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.samples)

    def times_slower_than(self, other: Candidate) -> float:
        """Median over the turns that both took: each turn's two times met the same state of the machine."""
        return statistics.median(
            t / other.turns[turn] for turn, t in self.turns.items() if turn in other.turns
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """When a candidate has been measured enough."""

    seconds: float = 1.0
    min_turns: int = 2
    max_turns: int = 5


def measure(candidates: Sequence[Candidate], budget: Budget) -> None:
    """Fills the `samples` of all. The first call of each warms up."""
    estimates = {c.name: timed(c.call) for c in candidates}
    for turn in range(budget.max_turns):
        first = turn % len(candidates)
        for c in (*candidates[first:], *candidates[:first]):
            if turn >= budget.min_turns and sum(c.samples) > budget.seconds:
                continue
            time.sleep(SETTLE_S)
            repeats = 1
            if estimates[c.name] < SHORT_S:
                c.call()
                repeats = max(1, min(20, round(SHORT_S / estimates[c.name])))
            samples = [timed(c.call) for _ in range(repeats)]
            c.samples.extend(samples)
            c.turns[turn] = statistics.median(samples)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
