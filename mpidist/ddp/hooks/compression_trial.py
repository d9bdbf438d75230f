"""Trial of compressions in a few steps of a training, and the choice by their times. Pure.

First each candidate has all buckets for a block of ``BLOCK`` steps: ``none``, then from the one
that sends least. The times of ``none`` measure the link, and bound those of the others from below
(``bound``): a candidate that at best would change nothing of the choice is not tried. From the
times by bucket a mixed table is made: the fastest method of each bucket, or one that changes the
gradients less where that costs the step nothing. Then the fastest candidates, ``none`` and the
mixed table have a block of ``FINAL_BLOCK`` steps, and the fastest *step* decides: what counts is
what a step takes longer, not how long a hook works beside the backward pass. So ``none`` remains
where no compression pays.

The times of a block are its shortest: a disturbance makes a step longer, never shorter. Each
block's first step, in which methods allocate their memory, is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Table: TypeAlias = tuple[str, ...]  # the method of each bucket

NONE, BF16, UINT8, POWERSGD = "none", "bf16", "uint8", "powersgd-"
BLOCK, FINAL_BLOCK = 3, 4  # steps
MOST_FINALS = 3
# Steps this much longer than the shortest do not come to the second half.
HOPELESS = 1.5
# Of two tables whose steps differ by less, the one that changes the gradients less.
SAME = 1.02
# Share of a step that no compression of its reductions makes shorter by what counts.
NEGLIGIBLE = 0.01
# Bytes for one element; PowerSGD's depend on its matrices, and are taken to be none.
_BYTES = {BF16: 2, UINT8: 1}


def powersgd_rank(method: str) -> int | None:
    """Return the rank of a PowerSGD method, None of another one."""
    rank = method.removeprefix(POWERSGD)
    is_rank = rank != method and rank.isascii() and rank.isdigit() and int(rank) > 0
    return int(rank) if is_rank else None


def in_order_of_loss(candidates: Sequence[str]) -> Table:
    """Return candidates from the one that changes gradients least; checks their names.

    Raises:
        TypeError: A candidate is no text.
        ValueError: A candidate is unknown or repeated, or ``none`` is missing.
    """
    loss = {}
    for name in candidates:
        if not isinstance(name, str):
            raise TypeError(f"a candidate of the adaptive hook must be a str; got {name!r}")
        rank = powersgd_rank(name)
        if name not in (NONE, BF16, UINT8) and rank is None:
            raise ValueError(
                f"the adaptive hook's candidates are {NONE!r}, {BF16!r}, {UINT8!r} and "
                f"'{POWERSGD}<rank>'; got {name!r}"
            )
        loss[name] = (NONE, BF16, UINT8).index(name) if rank is None else 3 + 1 / rank
    if len(loss) != len(candidates) or NONE not in loss:
        raise ValueError(
            f"the adaptive hook's candidates must be different ones, and {NONE!r} among them; got "
            f"{list(candidates)}"
        )
    return tuple(sorted(loss, key=loss.__getitem__))


@dataclass(frozen=True)
class Times:
    """Seconds of a step, or of several: the shortest of each part.

    Attributes:
        step_s: From one step's first bucket to the next step's.
        ready_s: By bucket: when its gradients were ready, from the first bucket's on, without the
            hook's computing before it.
        host_s: By bucket: the hook's computing in the backward pass.
        wire_s: By bucket: its reduction, which the backward pass may hide.
    """

    step_s: float
    ready_s: tuple[float, ...]
    host_s: tuple[float, ...]
    wire_s: tuple[float, ...]

    @property
    def buckets_s(self) -> tuple[float, ...]:
        """Return the time of each bucket until it is reduced."""
        return tuple(map(sum, zip(self.host_s, self.wire_s, strict=True)))


def shortest(steps: Sequence[Times]) -> Times:
    """Return the shortest time of each part."""
    return Times(
        min(one.step_s for one in steps),
        *(
            tuple(map(min, zip(*(getattr(one, part) for one in steps), strict=True)))
            for part in ("ready_s", "host_s", "wire_s")
        ),
    )


def predicted_end(
    ready_s: Sequence[float], host_s: Sequence[float], wire_s: Sequence[float]
) -> float:
    """Return when the last bucket is reduced: buckets travel in order on one channel."""
    hooks_s = channel_s = 0.0
    for ready, host, wire in zip(ready_s, host_s, wire_s, strict=True):
        hooks_s += host
        channel_s = max(channel_s, ready + hooks_s) + wire
    return channel_s


def mixed(times: Mapping[str, Times]) -> Table:
    """Return the fastest method of each bucket, or one that loses less and ends no later.

    Args:
        times: By candidate, from the one that changes gradients least.
    """
    ready = times[NONE].ready_s
    table = [
        min(times, key=lambda name: times[name].buckets_s[place]) for place in range(len(ready))
    ]

    def end(table: Sequence[str]) -> float:
        host = [times[name].host_s[place] for place, name in enumerate(table)]
        wire = [times[name].wire_s[place] for place, name in enumerate(table)]
        return predicted_end(ready, host, wire)

    latest = end(table)
    for place in range(len(table)):
        for name in times:
            if name == table[place]:
                break
            other = [*table[:place], name, *table[place + 1 :]]
            if end(other) <= latest:
                table = other
                break
    return tuple(table)


def bound(name: str, plain: Times, plain_bytes: int) -> Times:
    """Return the least times that a candidate can have, by those of ``none`` on the same link.

    It computes nothing, its bytes travel as fast as those of the plain average, and the step is
    shorter by all of what the reductions are.

    Args:
        name: The candidate.
        plain: Times of ``none``.
        plain_bytes: The most bytes that these took for one element of a gradient: its own, times
            the ranks of a node, each of which may have sent them, where the candidate sends once.
    """
    share = _BYTES.get(name, 0) / plain_bytes
    wire_s = tuple([share * wire for wire in plain.wire_s])
    saved_s = sum(plain.buckets_s) - sum(wire_s)
    return Times(plain.step_s - saved_s, plain.ready_s, (0.0,) * len(wire_s), wire_s)


class Trial:
    """Steps of a trial, and the table that it chooses.

    Args:
        candidates: Methods, from the one that changes gradients least (``in_order_of_loss``).
        buckets: Number of buckets.
        plain_bytes: The most bytes that ``none`` sends for one element (``bound``).

    Attributes:
        chosen: The table of the fastest step, when the trial is over.
        by_candidate: Times of each candidate that was tried, from the one that changes gradients
            least.
        steps_s: Seconds of the shortest step of each table, of both halves.
    """

    def __init__(self, candidates: Sequence[str], buckets: int, plain_bytes: int = 4) -> None:
        self.chosen: Table | None = None
        self.by_candidate: dict[str, Times] = {}
        self.steps_s: dict[Table, float] = {}
        self._candidates = list(candidates)
        # From the one that sends most: taken from the end.
        self._untried = self._candidates[1:]
        self._buckets = buckets
        self._plain_bytes = plain_bytes
        # Of the blocks after which the ranks agree: one candidate's, or all finals.
        self._tables: list[Table] = [(self._candidates[0],) * buckets]
        self._steps: list[Times] = []
        self._block = BLOCK
        self._are_finals = False
        if not self._untried:
            self.chosen = self._tables[0]

    @property
    def table(self) -> Table:
        """Return the table of the next step."""
        return (
            self.chosen or self._tables[min(len(self._steps) // self._block, len(self._tables) - 1)]
        )

    def add(self, step: Times) -> None:
        """Record this rank's times of a step by ``table``."""
        self._steps.append(step)

    @property
    def is_measured(self) -> bool:
        """Return whether these blocks are over: the ranks agree on ``own_times``."""
        return self.chosen is None and len(self._steps) >= self._block * len(self._tables)

    def own_times(self) -> list[Times]:
        """Return this rank's times of each table of these blocks."""
        return [
            shortest(self._steps[start + 1 : start + self._block])
            for start in range(0, len(self._steps), self._block)
        ]

    def conclude(self, agreed: Sequence[Times]) -> None:
        """End these blocks.

        Args:
            agreed: The times of each table, the same on all ranks.
        """
        for table, times in zip(self._tables, agreed, strict=True):
            self.steps_s[table] = min(times.step_s, self.steps_s.get(table, times.step_s))
        self._steps = []
        if not self._are_finals:
            self.by_candidate = self._with(self._tables[0][0], agreed[0])
            while self._untried:
                name = self._untried.pop()
                if self._could_matter(name):
                    self._tables = [(name,) * self._buckets]
                    return
            self._tables = _finals(self.steps_s, mixed(self.by_candidate))
            self._block, self._are_finals = FINAL_BLOCK, True
            if len(self._tables) > 1:
                return
        limit = SAME * min(self.steps_s[table] for table in self._tables)
        self.chosen = min(
            (table for table in self._tables if self.steps_s[table] <= limit),
            key=lambda table: sum(map(self._candidates.index, table)),
        )

    def _with(self, name: str, times: Times) -> dict[str, Times]:
        """Return the times of each candidate so far and of another, in the order of loss."""
        found = {**self.by_candidate, name: times}
        return {each: found[each] for each in self._candidates if each in found}

    def _could_matter(self, name: str) -> bool:
        """Return whether a candidate with its least times would change what is chosen."""
        plain = self.by_candidate[NONE]
        if sum(plain.buckets_s) <= NEGLIGIBLE * plain.step_s:
            return False
        least, fastest_s = bound(name, plain, self._plain_bytes), min(self.steps_s.values())
        if least.step_s <= SAME * fastest_s:
            return True
        # In a mixed table: in place of what changes the gradients more, or faster by what counts.
        loss = self._candidates.index
        pairs = zip(mixed(self.by_candidate), mixed(self._with(name, least)), strict=True)
        if any(after == name and loss(before) > loss(name) for before, after in pairs):
            return True
        known = zip(*[times.buckets_s for times in self.by_candidate.values()], strict=True)
        saved_s = sum(
            max(min(measured) - here, 0.0)
            for measured, here in zip(known, least.buckets_s, strict=True)
        )
        return saved_s > (SAME - 1) * fastest_s


def _finals(steps_s: Mapping[Table, float], other: Table) -> list[Table]:
    """Return the fastest tables and ``other``; ``none`` among them unless it is hopeless."""
    ranked = sorted(steps_s, key=steps_s.__getitem__)
    limit = HOPELESS * steps_s[ranked[0]]
    kept = [table for table in ranked if steps_s[table] <= limit]
    none = next(table for table in steps_s if set(table) <= {NONE})
    room = MOST_FINALS - 1
    if none in kept[room:]:
        kept = [*kept[: room - 1], none]
    return list(dict.fromkeys([*kept[:room], other]))
