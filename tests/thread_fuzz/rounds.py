"""Rounds: two threads draw steps on one group, and end with its close.

The ranks draw the same steps, but which thread's step comes first is each rank's own. So all
collectives of a group are alike: each sums four ones, whichever it meets.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from mpidist.c10d.work import TorchWork
from mpidist.errors import CommTimeout, GroupError
from mpidist.future import Future
from tests.fuzz.deadline import Deadline

_STEPS = 12  # of one thread
_JOIN_S = 60.0


class Round:
    """One group, and what two threads share on it.

    Args:
        group: A group that nothing else uses; closed at the end.
        draw: The seed's.
        rank: Shakes the times of this rank.
    """

    def __init__(self, group: Any, draw: random.Random, rank: int) -> None:
        self._group = group
        self._seeds = [draw.random() for _ in range(2)]
        self._is_closed_early = group.size == 1
        self._times = [random.Random(f"{seed} {rank}") for seed in self._seeds]
        self._expected: list[torch.Tensor] = []  # reduced once
        self._works: list[Any] = []
        self._called: list[Future[Any]] = []
        self._counts: list[tuple[str, list[int], int]] = []  # callbacks, their calls, the number
        self._shared: Future[int] = Future()
        self._seen: list[int] = []
        self.failures: list[str] = []

    def run(self) -> list[str]:
        """Run both threads; return what was wrong."""
        gate = threading.Barrier(2)
        threads = [
            threading.Thread(target=self._guarded, args=(number, gate), daemon=True)
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                return [*self.failures, "a thread has not ended"]
        self._check()
        return self.failures

    def _guarded(self, number: int, gate: threading.Barrier) -> None:
        try:
            self._steps(number, gate)
        except BaseException as error:
            self.failures.append(f"thread {number}: {error!r}")

    def _steps(self, number: int, gate: threading.Barrier) -> None:
        draw, times = random.Random(self._seeds[number]), self._times[number]
        own = torch.ones(4)  # one memory, whose call is prepared once
        gate.wait(_JOIN_S)
        if self._is_closed_early and number:
            time.sleep(times.random() * 2e-3)
            self._group.close()
        for place in range(_STEPS):
            kind = draw.choice((self._now, self._later, self._then, self._add, None))
            if times.random() < 0.3:
                time.sleep(times.random() * 1e-3)
            try:
                if kind is not None:
                    kind(times)
                else:
                    self._group.all_reduce(own.fill_(1))
                    if not bool(own.eq(self._group.size).all()):
                        self.failures.append(f"{own.tolist()} of a prepared call")
            except GroupError:
                if not self._is_closed_early:
                    raise
                break
            self._wait_for_some(times)
            if place == _STEPS // 2 and not self._is_closed_early:
                self._use_future(number)
        if not self._is_closed_early:
            # No rank closes while another step of its own is to come.
            gate.wait(_JOIN_S)
        self._group.close()
        if not self._group.is_closed:
            self.failures.append("close has returned before the group was closed")
        self._wait_for_some(times)

    # --- steps ---

    def _tensor(self, times: random.Random) -> torch.Tensor:
        # A prepared call for the first kind, a described one for the others.
        tensor = times.choice((torch.ones(4), torch.ones(2, 2).t(), torch.ones(8)[::2]))
        return tensor

    def _now(self, times: random.Random) -> None:
        tensor = self._tensor(times)
        self._group.all_reduce(tensor)
        self._expected.append(tensor)

    def _later(self, times: random.Random) -> Any:
        tensor = self._tensor(times)
        work = self._group.all_reduce(tensor, async_op=True)
        self._expected.append(tensor)
        self._works.append(work)
        self._works.append(TorchWork(work, [tensor]))
        return work

    def _then(self, times: random.Random) -> None:
        inner, is_async = self._tensor(times), times.random() < 0.5

        def reduce(future: Any) -> torch.Tensor:
            future.value()
            work = self._group.all_reduce(inner, async_op=is_async)
            if is_async:
                work.wait()
            return inner

        self._called.append(self._later(times).get_future().then(reduce))
        if not self._is_closed_early:  # there the callback's may be refused
            self._expected.append(inner)

    def _add(self, times: random.Random) -> None:
        calls: list[int] = []
        future = self._later(times).get_future()
        number = times.randint(1, 3)
        for count in range(number):
            future.add_done_callback(lambda one, count=count: calls.append(count))
        self._counts.append(("callbacks of a work", calls, number))

    def _wait_for_some(self, times: random.Random) -> None:
        """Wait for works of either thread, in any way."""
        works = list(self._works)
        for work in times.sample(works, min(2, len(works))):
            ways: tuple[Callable[[], Any], ...] = (
                work.wait,
                lambda work=work: work.wait(timedelta(seconds=_JOIN_S)),
                lambda work=work: work.wait(timedelta(milliseconds=1)),
                work.is_completed,
                work.exception,
                lambda work=work: work.get_future().wait(),
            )
            try:
                times.choice(ways)()
            except CommTimeout as error:
                if "0.001" not in str(error):
                    raise

    def _use_future(self, number: int) -> None:
        self._shared.add_done_callback(lambda one: self._seen.append(one.value()))
        if number:
            self._shared.set_result(7)
        elif self._shared.wait() != 7:
            self.failures.append("another value of the shared future")

    def _check(self) -> None:
        size = self._group.size
        works = list(self._works)
        self.failures += [f"{work} has not ended" for work in works if not work.is_completed()]
        for future in self._called:
            try:
                future.wait(_JOIN_S)
            except GroupError as error:
                if not self._is_closed_early:
                    self.failures.append(f"a callback: {error!r}")
        for tensor in self._expected:
            if not bool(tensor.eq(size).all()):
                self.failures.append(f"{tensor.tolist()} where {size} is expected")
        for what, calls, number in self._counts:
            if sorted(calls) != list(range(number)):  # a late one does not wait for others
                self.failures.append(f"{what}: {calls} of {number}")
        if not self._is_closed_early and self._seen != [7, 7]:
            self.failures.append(f"callbacks of the shared future: {self._seen}")
        if not self._group._progress.is_idle():
            self.failures.append("the closed group's queue is not idle")


def run(seed: int, world: Any, deadline: Deadline) -> list[str]:
    """Run a seed on all ranks; return what was wrong on any.

    Collective: over the world.
    """
    draw = random.Random(seed)
    is_alone = draw.random() < 0.3
    own = world.new_group([world.rank], f"alone {world.rank} {seed}") if is_alone else None
    group = own or world.clone(f"shared {seed}")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(draw.choice((interval, 1e-4, 1e-6)))
    deadline.now("its steps")
    try:
        failures = Round(group, draw, world.rank).run()
    finally:
        sys.setswitchinterval(interval)
    if any("not ended" in failure for failure in failures):
        return failures  # other ranks may wait for this one
    deadline.now("the exchange of the failures")
    found = world.all_gather_object(failures)
    return [f"rank {rank}: {one}" for rank, each in enumerate(found) for one in each]
