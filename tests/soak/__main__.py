"""Soak: all parts mixed by a seed, for as long as is asked, with constant counts.

mpirun -n 3 python -m tests.soak --seconds 3600 --seed 0

The ranks run worlds of operations (``plan``) one after the other. After each operation and each
world a rank counts its threads, descriptors, communicators and other objects of MPI, its memory,
what it maps of the node's memory and has there, and its objects of mpidist's classes. The counts of
the first tenth of the time, at least one world of each beginning, are bounds for the rest. What
grows is named with the kinds of operations in which it has grown, and the status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import itertools
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import mpidist.comm
import mpidist.rpc as rpc
from mpidist import elastic
from mpidist.comm.mpi.closed_communicators import KEPT
from mpidist.comm.mpi.library import MPI
from mpidist.rpc import api
from tests.fuzz import run_models, run_programs
from tests.fuzz.deadline import Deadline
from tests.rpc.limits import left_behind, soon
from tests.soak import plan
from tests.soak.counts import ALLOCATED, CLOSED, MEMORY, NODE_MEMORY, OF_CLASS, Counts
from tests.soak.flat import Changes, Flat, told
from tests.soak.holders import chain
from tests.soak.operations import Operations

# What may stand above the bound between two worlds: blocks of messages that came, which RPC keeps
# for others until the world is left (18 MiB of 256 were seen), and memory between malloc's
# blocks, which no trim gives back (three ranks grew by 65 MiB in 117 rounds, of which malloc had
# given out 6); communicators that are closed, whose number depends on the operations before; files
# of two commits, as many as the kind of the run has; MPI's operations for sums of integers of 1, 2,
# 4 and 8 bytes, which are made at their first use.
_BETWEEN = {
    MEMORY: 128 << 10,
    ALLOCATED: 64 << 10,
    NODE_MEMORY: 8 << 10,
    CLOSED: 4 * KEPT,
    "MPI groups": 4 * KEPT,
    "entries of /dev/shm": 16,
    "operations": 4,
}
_OBJECTS = 4  # of one class
# Within a world a count may be half as much again as in its first round, and this: RPC keeps as
# many threads as handlers wait, and the shapes that a group knows have a limit of their own.
_WITHIN = 16
_UNJUDGED = {
    MEMORY,
    ALLOCATED,
    NODE_MEMORY,
    CLOSED,
    f"{OF_CLASS}mpidist.comm.execution.fast_path.Reduction",
    f"{OF_CLASS}mpidist.comm.execution.fast_path.Movement",
    f"{OF_CLASS}mpidist.comm.messages.direct_messages.DirectMessage",
    # One for each dtype and operation.
    f"{OF_CLASS}mpidist.comm.algorithms.reduce_op.Reduction",
}
# The last 1024 flags of torch's Join, which torch holds without a reference.
_OF_JOIN = {
    f"{OF_CLASS}mpidist.c10d.work.TorchWork",
    f"{OF_CLASS}mpidist.comm.execution.work.Work",
    f"{OF_CLASS}mpidist.future.Future",
}
# Of each group that has had collectives in the last two minutes, where the watchdogs compare them
# once a minute: a world of a busy machine lasts longer than one of the first, and the watchdog
# lives on behind a world.
_OF_MINUTES = {f"{OF_CLASS}mpidist.comm.watchdog.arrivals._GroupArrivals"}
_SETTLES_S = 20.0  # in which threads end, and what other workers still hold is released
_TELLS_S = 10.0


def slack_between(name: str, bound: int) -> int:
    """Return how much a count between two worlds may stand above its bound."""
    if name.startswith(OF_CLASS):
        # RPC's transport, and its group, live on with the world: what these know differs.
        return sys.maxsize if name in _UNJUDGED | _OF_MINUTES else _OBJECTS + bound // 4
    return _BETWEEN.get(name, 0)


def slack_within(name: str, bound: int) -> int:
    """Return how much a count within a world may stand above that of the world's first round."""
    is_unjudged = name in _UNJUDGED | _OF_JOIN | _OF_MINUTES
    return sys.maxsize if is_unjudged else _WITHIN + bound // 2


class Soak:
    """A soak on one rank.

    Args:
        seconds: Its length, at least as long as the worlds whose counts are the bounds take.
        folder: For checkpoints, the same on all ranks.
    """

    def __init__(
        self,
        seed: int,
        seconds: float,
        kinds: tuple[str, ...],
        folder: Path,
        limit_s: float,
        keeps_going: bool,
    ) -> None:
        self._seed, self._seconds, self._kinds, self._folder = seed, seconds, kinds, folder
        self._keeps_going = keeps_going
        self._rank = MPI.COMM_WORLD.Get_rank()
        self._deadline = Deadline(limit_s, self._rank)
        self._counts = Counts()
        self._between = Flat(slack_between)
        self._changes = Changes()
        self._step = 0
        self.runs: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> list[str]:
        """Run worlds until the time is over or something is wrong; return what, on all ranks."""
        self._start_thread_of_receives()
        begin = told_at = time.monotonic()
        first = self._counts()
        number = 0
        while True:
            world = plan.world(self._seed, number, self._kinds)
            self._deadline.start(plan.described(world))
            self._begun(world)
            self._deadline.start(plan.described(world))
            self._deadline.now("the count after its end")
            elapsed = time.monotonic() - begin
            is_first = number < len(plan.BEGINNINGS) or elapsed < self._seconds / 10
            # Rank 0's clock decides for all.
            is_first, is_last = MPI.COMM_WORLD.bcast((is_first, elapsed > self._seconds))
            self._count(is_first, world)
            self._deadline.stop()
            found = list(itertools.chain(*MPI.COMM_WORLD.allgather(self.failures)))
            if is_last or (found and not self._keeps_going):
                last = self._counts()
                self._print(f"{number + 1} worlds, {elapsed:.0f} s: {dict(self.runs)}")
                self._print(f"at the beginning {_main(first)}")
                self._print(f"at the end {_main(last)}")
                for name in (MEMORY, ALLOCATED):
                    self._print(f"{name} by kind: {self._changes.of(name, len(self._kinds))}")
                return found
            if time.monotonic() - told_at > _TELLS_S:
                told_at = time.monotonic()
                self._print(f"{number + 1} worlds, {elapsed:.0f} s, {_main(self._counts())}")
            number += 1

    def _start_thread_of_receives(self) -> None:
        """Have a receive wait: the thread for those lives from the first one to the exit.

        That may come in a world behind those whose counts are the bounds.
        """
        group = mpidist.comm.init()
        received = torch.zeros(1)
        work = group.irecv(received, (group.rank - 1) % group.size)
        group.barrier()
        group.send(torch.ones(1), (group.rank + 1) % group.size)
        work.wait()
        assert received.item() == 1
        group.close()

    def _begun(self, world: plan.World) -> None:
        if world.beginning == "elastic":
            elastic.run(lambda: self._run_in(mpidist.comm.init(), world))
            return
        if world.beginning == "same":
            self._run_in(mpidist.comm.init(), world)
            return
        key = -self._rank if world.beginning == "reversed" else self._rank
        comm = MPI.COMM_WORLD.Split(0, key)
        group = mpidist.comm.init(comm=comm)
        comm.Free()
        self._run_in(group, world)

    def _run_in(self, group: Any, world: plan.World) -> None:
        """Run the operations of a world, and end all that it has."""
        with run_programs.torch_default_group():
            rpc.init_rpc(f"worker{group.rank}", group=group)
            agent = api._get_current_rpc_agent()
            operations = Operations(group, self._folder, self._deadline, self._step)
            # What is there already is counted between two worlds.
            gc.collect()
            gc.freeze()
            try:
                self._run_rounds(operations, group, world)
            finally:
                gc.unfreeze()
                self._step = operations.step
                self._deadline.now("the end of RPC")
                rpc.shutdown()
                self.failures += [f"rank {self._rank}: RPC left {one}" for one in left(agent)]
        group.close()

    def _run_rounds(self, operations: Operations, group: Any, world: plan.World) -> None:
        within = Flat(slack_within)
        before = self._counts()
        for place, one in enumerate(world.rounds):
            for operation in one:
                where = f"{operation} of {plan.described(world)}"
                self._deadline.start(where)
                self.runs[operation.kind] += 1
                failures = operations.run(operation)
                if failures:
                    self._note([f"{operation}: {failure}" for failure in failures])
                after = self._settled(within) if place else self._counts()
                self._changes.note(operation.kind, before, after)
                before = after
                grown = within.grown(after) if place else {}
                if grown:
                    self._fail(grown, where)
                    gc.freeze()
                if grown or not place:
                    within.learn(after)
                if self._ends_early(group):
                    return

    def _ends_early(self, group: Any) -> bool:
        is_wrong = bool(self.failures) and not self._keeps_going
        return any(group.all_gather_object(is_wrong))

    def _count(self, is_first: bool, world: plan.World) -> None:
        if is_first:
            self._between.learn(self._counts())
            return
        counts = self._settled(self._between)
        if grown := self._between.grown(counts):
            self._fail(grown, plan.described(world))
            self._between.learn(counts)

    def _settled(self, flat: Flat) -> dict[str, int]:
        """Return the counts once nothing stands above its bound, or after a while."""
        deadline = time.monotonic() + _SETTLES_S
        while flat.grown(counts := self._counts()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return counts

    def _fail(self, grown: dict[str, tuple[int, int]], where: str) -> None:
        names = [thread.name for thread in threading.enumerate()]
        lines = [f"rank {self._rank}: {line}" for line in told(grown, self._changes, names)]
        lines += [
            f"rank {self._rank}: {name} held by {chain(name.removeprefix(OF_CLASS))}"
            for name in grown
            if name.startswith(OF_CLASS)
        ]
        self._note([*lines, f"rank {self._rank}: after {where}"])

    def _note(self, lines: list[str]) -> None:
        self.failures += lines
        if self._keeps_going:
            print("\n".join(lines), flush=True)

    def _print(self, line: str) -> None:
        if self._rank == 0:
            print(line, flush=True)


def left(agent: Any) -> list[str]:
    """Return what RPC has left after its shutdown, once the threads have ended or after a while."""
    soon(lambda: not left_behind(agent), _SETTLES_S)
    return left_behind(agent)


def _main(counts: dict[str, int]) -> str:
    """Return counts in words; those of objects as one number."""
    ours = {name: count for name, count in counts.items() if name.startswith("objects of ")}
    rest = {name: count for name, count in counts.items() if name not in ours}
    words = [f"{count} {name}" for name, count in rest.items()]
    return ", ".join([*words, f"{sum(ours.values())} objects of mpidist's classes"])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=plan.KINDS, default=plan.KINDS)
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first that grows"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one operation")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    # Errors of called functions, of which the graphs have many.
    logging.getLogger("mpidist.rpc").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="soak-") as own:
        folder = Path(MPI.COMM_WORLD.bcast(own))
        # torch binds its default group of the time of the import for ever.
        importlib.import_module("torch.distributed.optim.zero_redundancy_optimizer")
        with run_programs.torch_default_group():
            run_models.warm_up()
        soak = Soak(
            options.seed,
            options.seconds,
            tuple(options.kinds),
            folder,
            options.limit,
            options.keep_going,
        )
        found = soak.run()
        MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.Get_rank() == 0:
        # All ranks have the failures of an operation.
        print("\n".join(dict.fromkeys(found)) or "all counts are flat", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
