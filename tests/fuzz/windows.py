"""Random programs of puts, signals and barriers on windows, as plain data, and their model. Pure.

A program is a list of phases. In a phase the ranks write to each other's tensors, each element by
one thread of one rank at most, which may write it several times; then they meet, at a barrier or by
signals, and every tensor must be as after the same writes one after the other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

DTYPES = ("uint8", "int16", "float32", "float64", "complex64")
LANES = 3


@dataclass(frozen=True)
class WindowOf:
    """A window: by rank, whether others map the tensor, and its elements."""

    dtype: str
    is_mapped: tuple[bool, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """One write of consecutive elements, with the values ``first``, ``first + 1``, … modulo 100.

    Attributes:
        lane: Thread of the source that writes; 0 is the main thread.
        way: "put", "async" (waited for before a barrier, not before a signal), "strided" (of a
            tensor that is not contiguous), or "store" (into the mapped tensor, if there is one).
    """

    window: int
    src: int
    dst: int
    lane: int
    offset: int
    numel: int
    first: int
    way: str


@dataclass(frozen=True)
class Phase:
    """Writes, and what follows.

    Attributes:
        writes: By any rank, each rank's in its order.
        meets: "barrier" or "signals".
        bells: Further signals (source, destination) before the meeting.
        answers: Waits for further signals (source, destination) behind it.
        renewed: A window that is deregistered after the phase and registered with new zeros.
    """

    writes: tuple[Write, ...]
    meets: str
    bells: tuple[tuple[int, int], ...]
    answers: tuple[tuple[int, int], ...]
    renewed: int | None


@dataclass(frozen=True)
class Program:
    """Phases on windows; the bells have a window of their own."""

    seed: int
    size: int
    windows: tuple[WindowOf, ...]
    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        """Number of writes, signals, waits and meetings of all ranks."""
        return sum(
            len(phase.writes) + len(phase.bells) + len(phase.answers) + self.size
            for phase in self.phases
        )


def program(seed: int, size: int, steps: int = 300) -> Program:
    """Return a seed's program for ``size`` ranks, of at least ``steps`` steps."""
    rng = random.Random(f"windows {seed} {size}")
    windows = tuple(_window(rng, size) for _ in range(rng.randint(1, 3)))
    phases: list[Phase] = []
    rung: Counter[tuple[int, int]] = Counter()
    drawn = Program(seed, size, windows, ())
    while drawn.steps < steps:
        phases.append(_phase(rng, size, windows, rung))
        drawn = Program(seed, size, windows, tuple(phases))
    return drawn


def lost(whole: Program, dst: int) -> dict[int, int]:
    """Return by source the bells to a rank that it never waits for."""
    left: Counter[int] = Counter()
    for phase in whole.phases:
        left.update(src for src, to in phase.bells if to == dst)
        left.subtract(src for src, to in phase.answers if to == dst)
    return {src: count for src, count in sorted(left.items()) if count}


def states(whole: Program) -> Iterator[list[list[np.ndarray]]]:
    """Yield after each phase the values of each window on each rank."""
    values = [[np.zeros(size, np.int64) for size in window.sizes] for window in whole.windows]
    for phase in whole.phases:
        for write in phase.writes:
            target = values[write.window][write.dst]
            target[write.offset : write.offset + write.numel] = values_of(write)
        yield values
        if phase.renewed is not None:
            values[phase.renewed] = [np.zeros_like(each) for each in values[phase.renewed]]


def values_of(write: Write) -> np.ndarray:
    """Return the values that a write leaves."""
    return (write.first + np.arange(write.numel)) % 100


def _window(rng: random.Random, size: int) -> WindowOf:
    share = rng.choice((0.0, 0.5, 1.0))
    is_mapped = tuple(rng.random() < share for _ in range(size))
    sizes = tuple(rng.choice((0, 1, 17, 400, 400, 30_000)) for _ in range(size))
    return WindowOf(rng.choice(DTYPES), is_mapped, sizes)


def _phase(
    rng: random.Random,
    size: int,
    windows: tuple[WindowOf, ...],
    rung: Counter[tuple[int, int]],
) -> Phase:
    writes: list[Write] = []
    for number, window in enumerate(windows):
        for dst, numel in enumerate(window.sizes):
            cuts = sorted(rng.randint(0, numel) for _ in range(rng.randint(0, 2 * size)))
            for start, end in zip([0, *cuts], [*cuts, numel], strict=True):
                if end > start and rng.random() < 0.7:
                    writes += _writes(rng, size, number, dst, start, end)
    rng.shuffle(writes)
    pairs = [(rng.randrange(size), rng.randrange(size)) for _ in range(rng.randint(0, size))]
    rung.update(pairs)
    open_pairs = [pair for pair, count in sorted(rung.items()) for _ in range(count)]
    answers = rng.sample(open_pairs, rng.randint(0, len(open_pairs)))
    rung.subtract(answers)
    return Phase(
        tuple(writes),
        rng.choice(("barrier", "signals")),
        tuple(pairs),
        tuple(answers),
        rng.randrange(len(windows)) if rng.random() < 0.1 else None,
    )


def _writes(
    rng: random.Random, size: int, window: int, dst: int, start: int, end: int
) -> list[Write]:
    """Return some writes of one thread within [start, end)."""
    src, lane = rng.randrange(size), rng.choice((0, 0, *range(LANES)))
    found = []
    for _ in range(rng.randint(1, 3)):
        first = rng.randint(start, end - 1)
        last = rng.choice((end, rng.randint(first + 1, end)))
        way = rng.choice(("put", "async", "async", "strided", "store"))
        found.append(Write(window, src, dst, lane, first, last - first, rng.randrange(100), way))
    return found
