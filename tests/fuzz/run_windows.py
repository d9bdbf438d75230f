"""Execution of a window program on one rank, and the comparison with its model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.window import WindowAccessType
from tests.fuzz.deadline import Deadline
from tests.fuzz.run_programs import gathered_failures
from tests.fuzz.windows import Phase, Program, WindowOf, Write, lost, states, values_of

GUARD = 16  # elements in front of and behind a tensor, which nothing may change


class Player:
    """Execution of one program on one rank.

    Attributes:
        failures: Of this rank.
    """

    def __init__(self, program: Program, group: Any) -> None:
        self.failures: list[str] = []
        self._program = program
        self._group = group
        self._wholes: list[torch.Tensor] = []
        # First, because it makes the node memory, which only some ranks allocate from below.
        self._bell = group.window(size=1)
        self._windows = [group.window(self._memory(window)) for window in program.windows]

    def play(self, deadline: Deadline) -> None:
        """Run all phases, and give the windows up."""
        expected = states(self._program)
        for number, phase in enumerate(self._program.phases):
            deadline.now(f"phase {number}")
            works = self._write_all(phase, number)
            for src, dst in phase.bells:
                if src == self._group.rank:
                    self._bell.signal(dst)
            self._meet(phase, works)
            self._check(number, [window[self._group.rank] for window in next(expected)])
            for work in works:
                work.wait()
            for src, dst in phase.answers:
                if dst == self._group.rank:
                    self._bell.wait_signal(src)
            # All have compared before the next phase writes.
            self._group.barrier()
            if phase.renewed is not None:
                self._windows[phase.renewed].tensor_deregister()
                window = self._program.windows[phase.renewed]
                self._windows[phase.renewed].tensor_register(self._memory(window, phase.renewed))
        deadline.now("the end")
        self._close()

    def _memory(self, window: WindowOf, place: int | None = None) -> torch.Tensor:
        rank, dtype = self._group.rank, getattr(torch, window.dtype)
        numel = window.sizes[rank] + 2 * GUARD
        whole = (
            self._group.allocate(numel, dtype).zero_()
            if window.is_mapped[rank]
            else torch.zeros(numel, dtype=dtype)
        )
        whole[:GUARD] = whole[numel - GUARD :] = 101
        if place is None:
            self._wholes.append(whole)
        else:
            self._wholes[place] = whole
        return whole[GUARD : numel - GUARD]

    def _write_all(self, phase: Phase, number: int) -> list[Any]:
        mine = [write for write in phase.writes if write.src == self._group.rank]
        lanes = [[write for write in mine if write.lane == lane] for lane in range(3)]
        works: list[Any] = []
        threads = [
            threading.Thread(target=self._write, args=(lane, works, number))
            for lane in lanes[1:]
            if lane
        ]
        for thread in threads:
            thread.start()
        self._write(lanes[0], works, number)
        for thread in threads:
            thread.join()
        return works

    def _write(self, writes: Sequence[Write], works: list[Any], number: int) -> None:
        for write in writes:
            try:
                self._write_one(write, works)
            except Exception as error:
                self.failures.append(f"phase {number}, {write}: {error!r}")

    def _write_one(self, write: Write, works: list[Any]) -> None:
        window = self._windows[write.window]
        dtype = getattr(torch, self._program.windows[write.window].dtype)
        values = torch.from_numpy(values_of(write)).to(dtype)
        if write.way == "store":
            access = window.get_attr(write.dst).access_type
            if access is WindowAccessType.UNIFIED:
                mapped = window.map_remote_tensor(write.dst)
                mapped[write.offset : write.offset + write.numel] = values
                return
        if write.way == "strided":
            values = values.view(-1, 1).expand(-1, 2)[:, 1]
        work = window.put(values, write.dst, write.offset, async_op=write.way == "async")
        if work is not None:
            works.append(work)

    def _meet(self, phase: Phase, works: Sequence[Any]) -> None:
        if phase.meets == "barrier":
            for work in works:
                work.wait()
            self._group.barrier()
            return
        # One signal for each window and pair of ranks with writes; it follows puts under way.
        pairs = sorted({(write.window, write.src, write.dst) for write in phase.writes})
        for window, src, dst in pairs:
            if src == self._group.rank:
                self._windows[window].signal(dst)
        for window, src, dst in pairs:
            if dst == self._group.rank:
                self._windows[window].wait_signal(src)

    def _check(self, number: int, expected: Sequence[Any]) -> None:
        for place, values in enumerate(expected):
            whole = self._wholes[place]
            wanted = torch.full_like(whole, 101)
            wanted[GUARD : GUARD + len(values)] = torch.from_numpy(values).to(whole.dtype)
            wrong = torch.nonzero(whole != wanted).view(-1)
            if len(wrong):
                first = int(wrong[0])
                self.failures.append(
                    f"phase {number}: {len(wrong)} elements of window {place} differ, the first "
                    f"at {first - GUARD}: expected {wanted[first].item()}, got "
                    f"{whole[first].item()}"
                )

    def _close(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for window in (*self._windows, self._bell):
                window.tensor_deregister()
        told = [str(each.message) for each in caught if each.category is ResourceWarning]
        expected = ", ".join(
            f"{count} of rank {src}" for src, count in lost(self._program, self._group.rank).items()
        )
        if "".join(text.split("waited for: ")[-1] for text in told) != expected:
            self.failures.append(f"the end: warned of {told}, and lost were {expected!r}")


def run(program: Program, group: Any, deadline: Deadline) -> list[str]:
    """Run a program on a clone of a group; return the failures of all ranks.

    Collective: over the group.
    """
    own = group.clone()
    player = Player(program, own)
    player.play(deadline)
    own.close()
    return gathered_failures(group, player.failures, {})
