"""State of the adaptive hook: settings, decisions, and PowerSGD's errors and factors.

Letters: W ranks of the group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.consistency import comparing
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.buckets.settings import require_int, require_real
from mpidist.ddp.hooks.compression_schedule import Names, Schedule
from mpidist.ddp.hooks.compression_trial import (
    BF16,
    NONE,
    UINT8,
    Times,
    in_order_of_loss,
)
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.node_means import NodeMeans, shares_nodes
from mpidist.ddp.hooks.powersgd_state import PowerSGDState, merged

Tensor = torch.Tensor

CANDIDATES = (NONE, BF16, UINT8, "powersgd-4", "powersgd-1")

_FORMAT = "mpidist.adaptive 1"
_FIELDS = ("format", "iter", "step_s", "decisions", "powersgd")


class Decision(NamedTuple):
    """Row of the table of decisions.

    Attributes:
        bucket: Place of the bucket in the order of the launches.
        parameters: Names of its parameters.
        numel: Its elements.
        method: What reduces it.
        sent_bytes: Bytes that a rank passes to the reduction in a step.
        measured_s: By candidate, seconds of the hook's computing and of the reduction in the last
            trial, without the wait for other buckets; of those that were tried, and empty without
            a trial in this process.
    """

    bucket: int
    parameters: Names
    numel: int
    method: str
    sent_bytes: int
    measured_s: dict[str, float]


@dataclass
class BucketCall:
    """A bucket in the hook: its method, and seconds of this rank's clock."""

    names: Names
    numel: int
    element_bytes: int
    method: str
    step: int
    sent_bytes: int
    # The hook is called, has issued the reduction; the reduction begins, has ended.
    entered: float
    issued: float = 0.0
    begun: float = 0.0
    ended: float = 0.0


class AdaptiveState:
    """Settings of ``adaptive_hook``, its decisions, and PowerSGD's errors and factors.

    One state serves one module. ``print(state)`` shows the table of decisions. ``state_dict()`` is
    plain data, and ``mpidist.checkpoint`` takes the state as ``hook_state``: on as many ranks a
    resumed run keeps the decisions, and tries again if its steps are longer or shorter; on another
    number of ranks it gets the mean of the errors, and decides anew.

    Collective: constructed by all ranks of the group.

    Args:
        process_group: A group of mpidist, or None for the default.
        candidates: Methods to choose from: ``"none"``, which is required, ``"bf16"``, ``"uint8"``
            (one scale for 512 elements), and ``"powersgd-<rank>"`` for any ranks.
        start_iter: Steps of plain averages before the trial, which takes at most three steps for
            each candidate and twelve more.
        check_interval: Steps after which the ranks compare the median step with that of the first
            interval. A trial that decides as the one before doubles it, up to 16 times.
        change: Share by which a step must have changed for another trial.
        min_compression_rate: PowerSGD compresses only matrices with (n + m) · r · rate < n · m.
        random_seed: Seed of PowerSGD's random Qs.

    Attributes:
        iter: Steps so far.
        powersgd: PowerSGD's errors and factors, for all ranks r in turn.
        schedule: Trials and decisions.
        means: The nodes, where several ranks share one and several methods are to choose from.
        decides: There is something to decide: the group has several nodes.

    Raises:
        TypeError, ValueError: An argument of another type, or out of its range.
        DisagreementError: Settings differ between ranks, or another rank raised.
    """

    def __init__(
        self,
        process_group: AnyGroup = None,
        candidates: Sequence[str] = CANDIDATES,
        start_iter: int = 2,
        check_interval: int = 50,
        change: float = 0.1,
        min_compression_rate: float = 2,
        random_seed: int = 0,
    ) -> None:
        group = native_group(process_group)
        with comparing(group, "AdaptiveState") as rows:
            require_int("start_iter", start_iter, least=0)
            require_int("check_interval", check_interval, least=1)
            require_real("change", change)
            self.candidates = in_order_of_loss(candidates)
            self.powersgd = PowerSGDState(
                group,
                start_powerSGD_iter=0,
                min_compression_rate=min_compression_rate,
                random_seed=random_seed,
            )
            rows += [
                ("candidates", list(self.candidates)),
                ("start_iter", start_iter),
                ("check_interval", check_interval),
                ("change", change),
                ("min_compression_rate", min_compression_rate),
                ("random_seed", random_seed),
            ]
        self.process_group = process_group
        self.iter = 0
        self.decides = not group.is_single_node and group.size > 1 and len(self.candidates) > 1
        self.means = NodeMeans(group) if self.decides and shares_nodes(group) else None
        self.schedule = Schedule(
            self.candidates,
            start_iter,
            check_interval,
            change,
            1 if self.means is None else self.means.ranks_per_node,
        )
        self._calls: list[BucketCall] = []  # of the present step; between steps of the last one
        self._is_between_steps = True
        self._is_loaded = False  # and no step has been begun since

    @property
    def error_dict(self) -> dict[str, Tensor]:
        """Return what PowerSGD has left out, by parameter name, in the parameter's shape."""
        return self.powersgd.error_dict

    @property
    def is_decided(self) -> bool:
        """Return whether each bucket has its method, and no trial is under way."""
        return not self.decides or (bool(self.schedule.decided) and not self.schedule.is_trying)

    def table(self) -> list[Decision]:
        """Return the buckets of the last step with their methods, in the order of the launches."""
        calls = self._calls
        measured = {
            name: times.buckets_s
            for name, times in self.schedule.measured.items()
            if len(times.ready_s) == len(calls)
        }
        return [
            Decision(
                place,
                call.names,
                call.numel,
                call.method,
                call.sent_bytes,
                {name: buckets_s[place] for name, buckets_s in measured.items()},
            )
            for place, call in enumerate(calls)
        ]

    def __str__(self) -> str:
        """Return the table of decisions as text, a line for each bucket."""
        lines = [
            f"adaptive hook after {self.iter} steps: "
            f"{'decided' if self.is_decided else 'not decided yet'}"
        ]
        for row in self.table():
            first, last = row.parameters[0], row.parameters[-1]
            times = ", ".join(f"{name} {1e3 * s:.3g}" for name, s in row.measured_s.items())
            lines.append(
                f"{row.bucket:>3}  {row.method:<11} {row.numel:>10} elements "
                f"{row.sent_bytes:>10} bytes  {first if first == last else f'{first} - {last}'}"
                f"{f' (ms: {times})' if times else ''}"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Close the groups of the nodes; without such groups do nothing.

        Collective: over the group, after the last step. The end of the job closes them, too.
        """
        if self.means is not None:
            self.means.close()

    # --- saved state ---

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors, its factors and the decisions; tensors are not copied."""
        return {
            "format": _FORMAT,
            "iter": self.iter,
            "step_s": self.schedule.step_s,
            "decisions": [[list(names), way] for names, way in self.schedule.decided.items()],
            "powersgd": self.powersgd.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``; the group and all settings stay.

        Raises:
            ValueError: ``state`` is no such state; nothing has been loaded.
        """
        decided, found = _decisions_of(state), _powersgd_of(state)
        self.powersgd.load_state_dict(
            {
                **self.powersgd.state_dict(),
                # A file may lie under the tensors that were read.
                "error_dict": {name: error.clone() for name, error in found.error_dict.items()},
                "q_memory_dict": {name: q.clone() for name, q in found.q_memory_dict.items()},
            }
        )
        self.iter = state["iter"]
        # Decisions among other candidates are not this run's.
        if not set(decided.values()) <= set(self.candidates):
            decided = {}
        self.schedule.resume(decided, state["step_s"] if decided else None)
        self._calls, self._is_between_steps, self._is_loaded = [], True, True

    @staticmethod
    def merged_state_dict(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state that another number of ranks loads, of those of all ranks of a run.

        It has the mean of their errors, and no decisions.

        Raises:
            ValueError: There is no state, one is none, or they are of different steps.
        """
        for state in states:
            _decisions_of(state)
        steps = {state["iter"] for state in states}
        if len(steps) > 1:
            raise ValueError(f"the adaptive hook's states are of different steps: {sorted(steps)}")
        mean = merged([_powersgd_of(state) for state in states])
        return {**states[0], "step_s": None, "decisions": [], "powersgd": mean.state_dict()}

    # --- steps ---

    def begin(self, bucket: GradBucket, group: Group) -> BucketCall:
        """Return a bucket's call with its method; the first bucket of a step begins the step.

        Collective: over the group, at the first bucket.
        """
        entered = time.perf_counter()
        if self._is_between_steps:
            self._begin_step(entered, group)
        calls, buffer, names = self._calls, bucket.buffer(), self.powersgd.names_of(bucket)
        method = self.schedule.method(len(calls), names) if self.decides else NONE
        if not _can_be(method, buffer):
            method = NONE
        numel, element_bytes = buffer.numel(), buffer.element_size()
        sent_bytes = numel * element_bytes
        call = BucketCall(names, numel, element_bytes, method, self.iter, sent_bytes, entered)
        calls.append(call)
        self._is_between_steps = bucket.is_last()
        self.iter += self._is_between_steps
        return call

    def _begin_step(self, now: float, group: Group) -> None:
        if self._is_loaded:
            self._agree_on_loaded(group)
        calls, self._calls = self._calls, []
        if not self.decides or not calls:
            return

        def agree(values: Sequence[float]) -> list[float]:
            found = torch.tensor(values, dtype=torch.float64, device="cpu")
            group.all_reduce(found, MAX)
            return found.tolist()

        step_s = now - calls[0].entered
        layout = tuple([call.names for call in calls])
        element_bytes = max([call.element_bytes for call in calls])
        self.schedule.begin_step(
            self.iter, layout, step_s, lambda: _times(calls, step_s), agree, element_bytes
        )

    def _agree_on_loaded(self, group: Group) -> None:
        """Compare what the ranks have loaded.

        Collective: over the group.
        """
        self._is_loaded = False
        with comparing(group, "the loaded AdaptiveState") as rows:
            rows += [
                ("step", self.iter),
                ("decisions", list(self.schedule.decided.items())),
                ("errors of", sorted(self.error_dict)),
            ]


def _can_be(method: str, buffer: Tensor) -> bool:
    """Return whether a method applies to a buffer and sends fewer bytes than it has."""
    if not buffer.numel() or buffer.dtype.is_complex:
        return False
    return method != BF16 or buffer.element_size() > 2


def _times(calls: Sequence[BucketCall], step_s: float) -> Times:
    """Return the times of a step from its calls."""
    first, hooks_s, ready_s = calls[0].entered, 0.0, []
    for call in calls:
        ready_s.append(call.entered - first - hooks_s)
        hooks_s += call.issued - call.entered
    return Times(
        step_s,
        tuple(ready_s),
        tuple([call.issued - call.entered for call in calls]),
        tuple([call.ended - call.begun for call in calls]),
    )


def _decisions_of(state: object) -> dict[Names, str]:
    """Return the decisions of a saved state, after a look at all of it but PowerSGD's part.

    Raises:
        ValueError: It is no such state.
    """
    fits = (
        isinstance(state, Mapping)
        and set(state) == set(_FIELDS)
        and state["format"] == _FORMAT
        and type(state["iter"]) is int
        and state["iter"] >= 0
        and (state["step_s"] is None or type(state["step_s"]) is float)
        and type(state["decisions"]) is list
    )
    if fits:
        rows = state["decisions"]  # type: ignore[index]
        if all(
            type(row) is list
            and len(row) == 2
            and type(row[0]) is list
            and all(type(name) is str for name in row[0])
            and type(row[1]) is str
            for row in rows
        ):
            return {tuple(names): method for names, method in rows}
    raise ValueError(f"an adaptive hook's state is of format {_FORMAT!r}; got something else")


def _powersgd_of(state: Mapping[str, Any]) -> PowerSGDState:
    found = PowerSGDState()
    found.load_state_dict(state["powersgd"])
    return found
