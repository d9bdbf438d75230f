"""Timed blocks of RPC contenders: rank 0 measures while the other ranks answer.

A block starts one contender, checks and times all cases, and shuts the contender down. Contenders
take turns in blocks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from harness import timing
from harness.timing import Contender
from rpc import cases as rpc_cases
from rpc import workers as rpc_workers
from rpc.cases import Case, SeriesKey
from rpc.goals import FLOOR, PING_PONG
from rpc.workers import begin, end_of_phase, follow_phases, noop

_KI, _MI = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Settings:
    """Sizes of the cases, and durations and repetitions of the measurements."""

    sizes_bytes: tuple[int, ...] = (_KI, 16 * _KI, 256 * _KI, 4 * _MI, 64 * _MI)
    many: tuple[int, ...] = (1, 10, 100, 1000)  # tensors per message
    burst: int = 2000  # asynchronous calls
    blocks: int = 6  # of each contender
    rounds: int = 4  # per block
    burst_s: float = 0.04
    busy_s: float = 1.5
    # A worker counts as idle this long after its last call.
    settle_s: float = 1.0
    idle_s: float = 3.0
    # Idle time is measured in the first blocks only.
    idle_blocks: int = 3


QUICK = Settings((_KI, 256 * _KI), (1, 10), 50, 1, 2, 0.001, 0.1, 0.05, 0.1, 1)


class Run:
    """Series of all contenders and cases, as measured on rank 0.

    Args:
        comm: mpi4py communicator of this rank alone.
        settings: Durations and repetitions.
        cases: The cases.
        names: The contenders that take part.
        measures_threads: Whether a callee that computes and an idle callee are measured, too.
    """

    def __init__(
        self,
        comm: Any,
        settings: Settings,
        cases: list[Case],
        names: list[str],
        measures_threads: bool,
    ) -> None:
        self.settings = settings
        self.cases = cases
        self.names = names
        self.busy: dict[str, list[dict[str, float]]] = {}
        self.idle: dict[str, list[float]] = {}
        self._comm = comm
        self._measures_threads = measures_threads
        self._series: dict[SeriesKey, list[timing.Series]] = {}

    def measure(self, name: str, rpc: Any) -> None:
        """Check and time all cases of one contender once.

        Raises:
            RuntimeError: A call returned a wrong result.
        """
        for case in self.cases:
            key, rounds = case.key(name), self.settings.rounds
            if case.has_references and name == "tensorpipe":
                # TensorPipe's references work only after its first start in a process, so the
                # first block runs all rounds.
                if key in self._series:
                    continue
                rounds *= self.settings.blocks
            one_pass = case.make(rpc, "worker1")
            if not case.is_right(one_pass()):
                raise RuntimeError(
                    f"{case.operation} of {case.size_bytes} bytes: wrong result of {name}"
                )
            self.time(key, one_pass, rounds)
        if self._measures_threads:
            self.busy.setdefault(name, []).append(_busy_callee(rpc, self.settings))
            if len(self.idle.setdefault(name, [])) < self.settings.idle_blocks:
                self.idle[name].append(_idle_share(rpc, self.settings))

    def time(self, key: SeriesKey, one_pass: rpc_cases.Pass, rounds: int | None = None) -> None:
        """Time rounds of one case of one contender; as many as the settings name if None."""
        contender = Contender(key.contender, (one_pass,), ())
        (series,) = timing.time_rounds(
            self._comm, [contender], rounds or self.settings.rounds, self.settings.burst_s
        )
        self._series.setdefault(key, []).append(series)

    def series_of(self, case: Case) -> list[timing.Series]:
        """Return a case's series by contender, with the series that it is compared with.

        Rounds of equal index were measured at nearly the same time.
        """
        calls = {case.key("").case: case.calls for case in self.cases}
        shown = [(name, case.key(name)) for name in self.names]
        found = []
        for label, key in [*shown, *case.against]:
            blocks = self._series[key]
            divisor = calls.get(key.case, 1)
            rounds_us = tuple(us / divisor for block in blocks for us in block.rounds_us)
            found.append(timing.Series(label, blocks[0].passes_per_burst, divisor, rounds_us))
        return found


def floor_block(comm: Any, run: Run) -> None:
    """Measure the floor under a call and a message, with no contender started.

    Collective: over ``comm``.
    """
    # rpc_floor imports mpi4py.MPI, so mpidist has to prepare MPI first.
    from rpc import floor as rpc_floor

    floor = rpc_floor.Floor(comm)
    if comm.Get_rank() == 0:
        if floor.rpc_sync(1, rpc_workers.one) != 1:
            raise RuntimeError("wrong result of the floor")
        run.time(SeriesKey(FLOOR, "no-op", 0), partial(floor.rpc_sync, 1, noop))
        for rank in range(1, comm.Get_size()):
            floor.leave(rank)
    else:
        floor.serve()
    floor.close()
    for size in (case.size_bytes for case in run.cases if case.operation == "echo"):
        # Both ranks touch their memory here, and use the same memory for each message.
        memory, back = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        if comm.Get_rank() == 0:
            run.time(
                SeriesKey(PING_PONG, "echo", size),
                partial(rpc_floor.round_trip, comm, 1, memory, back),
            )
            rpc_floor.end_bounce(comm, 1)
            if not np.array_equal(memory, back):
                raise RuntimeError("wrong result of the ping-pong")
        elif comm.Get_rank() == 1:
            rpc_floor.bounce(comm, 0, back)
    comm.Barrier()


def contender_block(name: str, group: Any, run: Run) -> None:
    """Start one contender, measure all cases, and shut the contender down.

    Collective: over ``group``.
    """
    # TensorPipe's threads never sleep: a contender that stayed up would take cores from the next.
    rpc = rpc_workers.start(name, group)
    if group.rank == 0:
        try:
            run.measure(name, rpc)
        finally:
            for rank in range(1, group.size):
                rpc.rpc_sync(f"worker{rank}", begin, args=("leave",))
    else:
        follow_phases()
    rpc_workers.end(name, group)


def _busy_callee(rpc: Any, settings: Settings) -> dict[str, float]:
    """Time no-ops one by one while the callee's main thread computes in Python."""
    rpc.rpc_sync("worker1", begin, args=("compute",))
    times_ms = []
    end = time.perf_counter() + settings.busy_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        rpc.rpc_sync("worker1", noop)
        times_ms.append(1e3 * (time.perf_counter() - start))
        # Without a pause the callee would answer calls all the time and hardly compute.
        time.sleep(1e-3)
    rpc.rpc_sync("worker1", end_of_phase)
    median, p99 = np.percentile(times_ms, (50, 99))
    return {"median_ms": float(median), "p99_ms": float(p99), "calls": len(times_ms)}


def _idle_share(rpc: Any, settings: Settings) -> float:
    """Return the share of a core that a worker without calls uses."""
    rpc.rpc_sync("worker1", begin, args=("idle", settings.settle_s, settings.idle_s))
    time.sleep(settings.settle_s + settings.idle_s + 0.1)
    return float(rpc.rpc_sync("worker1", rpc_workers.idle_share))
