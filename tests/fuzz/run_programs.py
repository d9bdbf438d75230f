"""Execution of random programs on the ranks of a job, with all failures gathered on all ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from mpidist.comm.messages import request_work
from mpidist.comm.world_group import from_world
from tests.fuzz.call_steps import CallSteps
from tests.fuzz.deadline import Deadline
from tests.fuzz.issue import Handle
from tests.fuzz.message_steps import MessageSteps
from tests.fuzz.programs import (
    Close,
    InOrder,
    Lanes,
    Make,
    Messages,
    ObjectMessages,
    Program,
    Step,
    Then,
    described,
)
from tests.fuzz.rank_run import RankRun
from tests.tools.simulated_nodes import lay_out


class Player:
    """Execution of one program on one rank."""

    def __init__(self, run: RankRun, deadline: Deadline) -> None:
        self._run = run
        self._deadline = deadline
        self._calls = CallSteps(run)
        self._messages = MessageSteps(run)

    def play(self) -> None:
        """Run all steps, wait for all operations, close all groups."""
        names: list[str] = []
        try:
            for place, step in enumerate(self._run.program.steps):
                self._deadline.now(f"step {place}: {described(step)}")
                self._do(str(place), step, place)
                names = [handle.native.name for handle in self._run.handles.values()]
                self._finish_due(place)
            self._deadline.now("waits at the end")
            self._finish_due(None)
        except Exception as error:
            self._run.fail("a step that everything else needs", error)
        for number in sorted(self._run.handles, reverse=True):
            self._deadline.now(f"close of group {number}")
            self._close(number)
        request_work.release_orphans()
        if request_work.orphans:
            self._run.fail("the end", f"{len(request_work.orphans)} request(s) left")
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread.name in {f"mpidist-{name}" for name in names}
        ]
        if left:
            self._run.fail("the end", f"threads left: {left}")

    def _do(self, where: str, step: Step, place: int) -> None:
        if isinstance(step, Make):
            self._make(step.group)
        elif isinstance(step, Close):
            self._close(step.group)
        elif isinstance(step, Lanes):
            self._calls.lanes(where, step)
        elif isinstance(step, Then):
            self._calls.then(where, step, place)
        elif isinstance(step, InOrder):
            self._calls.in_order(where, step, place)
        elif isinstance(step, Messages):
            self._messages.messages(where, step, place)
        elif isinstance(step, ObjectMessages):
            self._messages.object_messages(where, step)
        elif step.group in self._run.handles:
            pending = self._calls.call(where, step, place)
            if pending is not None:
                self._run.pending.append(pending)

    def _finish_due(self, place: int | None) -> None:
        due = [item for item in self._run.pending if place is None or item.due <= place]
        self._run.rng.shuffle(due)
        for item in due:
            item.finish()
        self._run.pending = [
            item for item in self._run.pending if all(item is not other for other in due)
        ]

    def _make(self, number: int) -> None:
        group, seed = self._run.program.groups[number], self._run.program.seed
        if group.how == "world":
            self._run.handles[number] = Handle(
                from_world(f"fuzz {seed}", 1800.0, debug=group.is_debug)
            )
            return
        if group.how == "torch":
            created = dist.new_group(list(group.members))
            if self._run.world_rank in group.members:
                self._run.handles[number] = Handle(created.native, created)
            return
        assert group.parent is not None
        above = self._run.program.groups[group.parent].members
        if self._run.world_rank not in above:
            return
        parent = self._run.handles[group.parent].native
        if group.how == "clone":
            self._run.handles[number] = Handle(parent.clone())
        elif group.how == "new_group":
            native = parent.new_group([above.index(member) for member in group.members])
            if native is not None:
                self._run.handles[number] = Handle(native)
        else:
            is_in = self._run.world_rank in group.members
            other = None if seed % 2 else 1
            native = parent.split(
                0 if is_in else other, group.members.index(self._run.world_rank) if is_in else 0
            )
            if is_in:
                self._run.handles[number] = Handle(native)
            elif native is not None:
                native.close()

    def _close(self, number: int) -> None:
        if number not in self._run.handles:
            return
        handle = self._run.handles[number]
        mine = [item for item in self._run.pending if item.group == number]
        for item in mine:
            if item.blocks_close:
                item.finish()
        if handle.torch is not None:
            dist.destroy_process_group(handle.torch)
        else:
            handle.native.close()
        del self._run.handles[number]
        for item in mine:
            if not item.blocks_close:
                item.finish()
        self._run.pending = [item for item in self._run.pending if item.group != number]


def run(program: Program, verdicts: Any, deadline: Deadline, is_quiet: bool = False) -> list[str]:
    """Run a program; return the failures of all ranks.

    Collective: over ``verdicts``, the group of all ranks.
    """
    own = RankRun(program, verdicts.rank, is_quiet)
    with pytest.MonkeyPatch.context() as patch:
        lay_out(verdicts, patch, program.nodes)
        Player(own, deadline).play()
    deadline.now("the verdict of all ranks")
    return gathered_failures(verdicts, own.failures, own.outcomes)


def gathered_failures(verdicts: Any, failures: list[str], outcomes: dict[str, str]) -> list[str]:
    """Return all failures, and the calls that only some ranks refused.

    Collective: over ``verdicts``.
    """
    everything = verdicts.all_gather_object((failures, outcomes))
    reports = [
        f"rank {rank}: {failure}" for rank, (found, _) in enumerate(everything) for failure in found
    ]
    for where in sorted({where for _, ends in everything for where in ends}):
        ends = {
            rank: outcomes[where]
            for rank, (_, outcomes) in enumerate(everything)
            if where in outcomes
        }
        if len(set(ends.values())) > 1:
            reports.append(f"{where}: not alike on all ranks: {ends}")
    return reports


@contextlib.contextmanager
def torch_default_group() -> Iterator[None]:
    """Create torch's default group on mpidist's backend for the block."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("mpidist")
    try:
        yield
    finally:
        dist.destroy_process_group()
