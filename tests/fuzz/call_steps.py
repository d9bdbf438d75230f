"""Execution of calls on one rank: single, from threads, from callbacks, and as one operation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from mpidist.errors import DisagreementError
from tests.fuzz.issue import Handle, issue, objects
from tests.fuzz.memory import Memory
from tests.fuzz.operands import operands
from tests.fuzz.programs import (
    OBJECTS,
    Call,
    InOrder,
    Lanes,
    Then,
    described,
)
from tests.fuzz.rank_run import Pending, RankRun
from tests.fuzz.references import expected

MODES: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
_REFUSALS = (TypeError, ValueError, DisagreementError)


class CallSteps:
    """Issues the calls of a program, waits for them, and checks their results."""

    def __init__(self, run: RankRun) -> None:
        self._run = run

    def call(self, where: str, call: Call, place: int) -> Pending | None:
        """Execute a call with its repeats; the last repeat may stay asynchronous."""
        handle = self._run.handles[call.group]
        rank, size = handle.rank, handle.size
        if call.kind in OBJECTS:
            try:
                for _ in range(call.repeats):
                    with MODES[call.modes[rank]]():
                        wrong = objects(handle, call)
                    if wrong:
                        self._run.fail(f"{where}, {described(call)}", wrong)
            except Exception as error:
                self._run.fail(f"{where}, {described(call)}", error)
            return None
        with MODES[call.modes[rank]]():
            memory = Memory(call, operands(call, rank, size))
        for time in range(call.repeats):
            finish = self._issued(where, call, memory, handle)
            if call.is_async[rank] and time == call.repeats - 1:
                return Pending(place + call.waits[rank], call.group, finish)
            finish()
            memory.refill()
        return None

    def lanes(self, where: str, step: Lanes) -> None:
        def run(lane: int, calls: tuple[Call, ...]) -> None:
            try:
                pending = [
                    self.call(f"{where}.{lane}.{i}", call, 0) for i, call in enumerate(calls)
                ]
                for item in pending:
                    if item is not None:
                        item.finish()
            except Exception as error:
                self._run.fail(f"{where}.{lane}", error)

        threads = [
            threading.Thread(target=run, args=(lane, calls), name=f"lane-{lane}", daemon=True)
            for lane, calls in enumerate(step.lanes)
            if calls[0].group in self._run.handles
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def then(self, where: str, step: Then, place: int) -> None:
        first, second = step.first, step.second
        if first.group not in self._run.handles:
            return
        handle = self._run.handles[first.group]
        rank, size = handle.rank, handle.size
        with MODES[first.modes[rank]]():
            one = Memory(first, operands(first, rank, size))
            work = issue(handle, first, one.inputs, one.outputs)
        with MODES[second.modes[rank]]():
            two = Memory(second, operands(second, rank, size))
        ends: list[Callable[[], None]] = []
        is_called = threading.Event()

        def callback(future: Any) -> int:
            try:
                ends.append(self._issued(f"{where}.then", second, two, handle))
            except Exception as error:
                self._run.fail(f"{where}.then", error)
            is_called.set()
            return place

        if step.api == "done":
            chained = None
            (work.future if hasattr(work, "future") else work.get_future()).add_done_callback(
                callback
            )
        else:
            chained = work.get_future().then(callback)

        def finish() -> None:
            error: Exception | None = None
            try:
                work.wait()
                if chained is not None and chained.wait() != place:
                    self._run.fail(where, "the chained future has another value")
                is_called.wait()
            except Exception as raised:
                error = raised
            self._record_outcome(where, first, one, error, rank, size)
            for end in ends:
                end()

        self._run.pending.append(
            Pending(place + first.waits[rank], first.group, finish, blocks_close=True)
        )

    def in_order(self, where: str, step: InOrder, place: int) -> None:
        group = step.calls[0].group
        if group not in self._run.handles:
            return
        handle = self._run.handles[group]
        rank = handle.rank
        ends: list[Callable[[], None]] = []

        def stages() -> None:
            for i, call in enumerate(step.calls):
                pending = self.call(f"{where}.{i}", call, place)
                if pending is not None:
                    ends.append(pending.finish)

        work = handle.native.in_order(stages, async_op=step.is_async[rank])

        def finish() -> None:
            try:
                if work is not None:
                    work.wait()
            except Exception as error:
                self._run.fail(where, error)
            for end in ends:
                end()

        self._run.pending.append(
            Pending(place + step.calls[0].waits[rank], group, finish, blocks_close=True)
        )

    def _issued(self, where: str, call: Call, memory: Memory, handle: Handle) -> Callable[[], None]:
        """Issue a call once; return the function that waits and checks."""
        rank, size = handle.rank, handle.size
        refused: Exception | None = None
        work = None
        try:
            with MODES[call.modes[rank]]():
                work = issue(handle, call, memory.inputs, memory.outputs)
        except Exception as error:
            refused = error
        by_future = call.seed % 3 == 0 and hasattr(work, "get_future")

        def finish() -> None:
            error = refused
            try:
                if work is not None:
                    (work.get_future() if by_future else work).wait()
            except Exception as raised:
                error = raised
            self._record_outcome(where, call, memory, error, rank, size)

        return finish

    def _record_outcome(
        self, where: str, call: Call, memory: Memory, error: Exception | None, rank: int, size: int
    ) -> None:
        """Record the outcome of a call: right, refused where allowed, or wrong."""
        if error is not None:
            if not (call.may_refuse or call.must_refuse) or not isinstance(error, _REFUSALS):
                self._run.fail(f"{where}, {described(call)}", error)
                return
            self._run.outcomes[where] = "refused"
            wrong = memory.difference([])
        elif call.must_refuse:
            self._run.fail(f"{where}, {described(call)}", "neither TypeError nor ValueError")
            return
        else:
            if call.may_refuse:
                self._run.outcomes[where] = "right"
            wrong = memory.difference(expected(call, rank, size))
        if wrong:
            self._run.fail(f"{where}, {described(call)}", wrong)
