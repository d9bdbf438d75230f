"""Schedule of compressions over a training: trials, decisions, and when to try again. Pure.

The ranks agree on times by a function that the caller gives, the largest of all ranks' values, and
so make the same decisions at the same steps, however their clocks differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from mpidist.ddp.hooks.compression_trial import NONE, Table, Times, Trial

Names: TypeAlias = tuple[str, ...]  # of the parameters of one bucket
# Returns the largest of all ranks' values, place by place.
Agree: TypeAlias = Callable[[Sequence[float]], Sequence[float]]

LONGEST_INTERVAL = 16  # times the first one


class StepWatch:
    """Watch over the length of steps: tells when it has changed for good.

    Args:
        interval: Steps whose median is one length.
        change: Share by which a length must differ from the reference.
        reference_s: Seconds of a step; None for the first interval's.
    """

    def __init__(self, interval: int, change: float, reference_s: float | None = None) -> None:
        self.reference_s = reference_s
        self._interval = interval
        self._change = change
        self._steps_s: list[float] = []

    def add(self, step_s: float, agree: Agree) -> bool:
        """Record a step; return whether the length has changed, at the end of an interval."""
        self._steps_s.append(step_s)
        if len(self._steps_s) < self._interval:
            return False
        (length_s,) = agree([statistics.median(self._steps_s)])
        self._steps_s = []
        if self.reference_s is None:
            self.reference_s = length_s
        return abs(length_s - self.reference_s) > self._change * self.reference_s


class Schedule:
    """Methods of the buckets, step by step.

    Args:
        candidates: Methods, from the one that changes gradients least.
        start_iter: Steps of plain averages at the beginning.
        check_interval: Steps of a ``StepWatch``'s interval; a trial that decides as the one before
            doubles it.
        change: Share by which a step must change for another trial.
        ranks_per_node: The most ranks on one node.

    Attributes:
        table: Methods of the present step's buckets, in the order of the launches; empty in the
            first step, whose buckets are not known before.
        decided: Methods by the names of a bucket's parameters; empty before the first decision.
        measured: Times of each candidate that the last trial tried.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        start_iter: int,
        check_interval: int,
        change: float,
        ranks_per_node: int = 1,
    ) -> None:
        self.table: Table = ()
        self.decided: dict[Names, str] = {}
        self.measured: dict[str, Times] = {}
        self._candidates = candidates
        self._start_iter = start_iter
        self._check_interval = check_interval
        self._interval = check_interval
        self._change = change
        self._ranks_per_node = ranks_per_node
        self._layout: tuple[Names, ...] = ()
        self._trial: Trial | None = None
        self._watch: StepWatch | None = None

    @property
    def is_trying(self) -> bool:
        """Return whether the present step belongs to a trial."""
        return self._trial is not None

    @property
    def step_s(self) -> float | None:
        """Return the length of a step with the present decisions; None before it is known."""
        return None if self._watch is None else self._watch.reference_s

    def method(self, place: int, names: Names) -> str:
        """Return the method of a bucket in the present step, by its place or its parameters."""
        if self._trial is not None and place < len(self.table):
            return self.table[place]
        return self.decided.get(names, NONE)

    def resume(self, decided: Mapping[Names, str], step_s: float | None) -> None:
        """Go on from an earlier run's decisions; none of them: with a trial."""
        self.decided, self.measured = dict(decided), {}
        self.table, self._layout, self._trial = (), (), None
        self._watch = None if step_s is None else self._new_watch(step_s)

    def begin_step(
        self,
        step: int,
        layout: tuple[Names, ...],
        step_s: float,
        times: Callable[[], Times],
        agree: Agree,
        element_bytes: int = 4,
    ) -> None:
        """Set ``table`` for a step.

        Args:
            step: Its number, from 0.
            layout: Names of each bucket's parameters in the last step.
            step_s: Seconds of the last step.
            times: Returns the parts of it.
            agree: Called at the same steps on all ranks.
            element_bytes: Bytes of the widest gradient's elements.
        """
        if layout != self._layout:
            # The first steps, or buckets that were laid out again; decisions that were loaded hold.
            self._layout, self._trial = layout, None
            if not all(names in self.decided for names in layout):
                self.decided, self._watch = {}, None
        elif self._trial is not None:
            self._try(self._trial, times(), agree)
        elif self._watch is not None and self._watch.add(step_s, agree):
            self._begin_trial(element_bytes)
        if self._trial is None and not self.decided and step >= self._start_iter:
            self._begin_trial(element_bytes)
        if self._trial is not None:
            self.table = self._trial.table
        else:
            self.table = tuple(self.decided.get(names, NONE) for names in layout)

    def _begin_trial(self, element_bytes: int) -> None:
        plain_bytes = element_bytes * self._ranks_per_node
        self._trial = Trial(self._candidates, len(self._layout), plain_bytes)
        self._watch = None

    def _try(self, trial: Trial, times: Times, agree: Agree) -> None:
        trial.add(times)
        if not trial.is_measured:
            return
        trial.conclude(agreed_times(trial.own_times(), agree))
        self.measured = trial.by_candidate
        if trial.chosen is None:
            return
        before, self.decided = self.decided, dict(zip(self._layout, trial.chosen, strict=True))
        # A step that changes without a reason within reach need not be looked at so often.
        longest = LONGEST_INTERVAL * self._check_interval
        is_same = before == self.decided
        self._interval = min(2 * self._interval, longest) if is_same else self._check_interval
        self._trial, self._watch = None, self._new_watch(None)

    def _new_watch(self, reference_s: float | None) -> StepWatch:
        return StepWatch(self._interval, self._change, reference_s)


def agreed_times(own: Sequence[Times], agree: Agree) -> list[Times]:
    """Return all ranks' times: the slowest step and computing, the shortest reductions.

    A rank that comes early to a reduction waits there for the others; the last one measures it.
    """
    flat: list[float] = []
    for times in own:
        flat += (times.step_s, *times.ready_s, *times.host_s, *(-each for each in times.wire_s))
    found, count = list(agree(flat)), len(own[0].ready_s)
    agreed = []
    for start in range(0, len(found), 1 + 3 * count):
        parts = [
            tuple(found[start + 1 + part * count : start + 1 + (part + 1) * count])
            for part in range(3)
        ]
        agreed.append(Times(found[start], parts[0], parts[1], tuple(-each for each in parts[2])))
    return agreed
