"""Signals of a scheduler that takes its nodes back, or whose time limit is near: noted, and told to all ranks at a step.

Slurm sends SIGTERM to a job that it preempts, and with ``--signal=USR1@120`` SIGUSR1 120 s before
the time limit. Ranks get them at different moments; the all-reduce of ``requested`` makes all stop
at the same step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.resolve_group import native_group
from mpidist.errors import MpidistError

# EX_TEMPFAIL of sysexits.h: the program has saved and is to be started again.
REQUEUE_EXIT_CODE = 75

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Preemption:
    """Context in which signals stop nobody: they are noted, and ``requested`` tells all ranks.

    A further signal while the state is being saved changes nothing. A handler of Python that was
    there before is called once for each signal; at the end of the context all former handlers come
    back. Workers of a ``DataLoader`` get signals that are meant for the whole job, too: give it
    ``worker_init_fn=mpidist.checkpoint.ignore_signals``.

    Args:
        group: Native group, or torch group on the backend ``mpidist``; the default group if None.
        signals: To note. With ``signal.SIGINT`` Ctrl-C is taken for a request as well.

    Attributes:
        received: Names of the signals that this rank got, in their order.

    Raises:
        MpidistError: The context is entered outside the main thread, where Python handles no
            signals.
    """

    def __init__(self, group: Any = None, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._group = native_group(group)
        self._signals = tuple(signals)
        self._former: dict[int, Any] = {}
        self.received: list[str] = []

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise MpidistError(
                "Preemption must be entered in the main thread: Python runs handlers of signals "
                "there alone. Enter it in the "
                "script's main part, and call requested() anywhere; this is thread "
                f"{threading.current_thread().name!r}"
            )
        for number in self._signals:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *reason: object) -> None:
        while self._former:
            number, handler = self._former.popitem()
            # None: it was set outside Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def requested(self, also: bool = False) -> bool:
        """Say whether any rank got a signal, or gave ``also``; the same answer on all ranks.

        Collective: over the group, an all-reduce of 4 bytes; called once a step, or once every few.

        Args:
            also: A reason of this rank's own to stop: its time is over.
        """
        wanted = int(bool(self.received) or also)
        if self._group.size == 1:
            return bool(wanted)
        flag = torch.tensor([wanted], dtype=torch.int32, device="cpu")
        self._group.all_reduce(flag, MAX)
        return bool(flag.item())

    def _note(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        is_first = name not in self.received
        self.received.append(name)
        former = self._former.get(number)
        # Once: a handler that ends the process by an exception must not end a save that is under
        # way.
        if is_first and callable(former) and former is not signal.default_int_handler:
            former(number, frame)


def ignore_signals(worker: int = 0) -> None:
    """Have this process ignore what ``Preemption`` notes; for ``DataLoader(worker_init_fn=…)``.

    A scheduler signals all processes of a job. A worker that SIGTERM ends would have the
    ``DataLoader`` raise before the rank can save.

    Args:
        worker: Its number, without effect.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
