"""Preemption signals of a scheduler: recorded on each rank, and reduced over all ranks at a step.

Slurm sends SIGTERM to a job that it preempts, and with ``--signal=USR1@120`` SIGUSR1 120 s before
the time limit. Ranks receive them at different times; the all-reduce in ``requested`` makes all
ranks stop at the same step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import torch

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.world_group import native_group
from mpidist.errors import MpidistError

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Preemption:
    """Context in which signals do not end the process; ``requested`` reports them to all ranks.

    Further signals during a save change nothing. A Python handler set before the context is called
    once for each signal; the end of the context restores all former handlers. Workers of a
    ``DataLoader`` also receive signals to the whole job: give the ``DataLoader``
    ``worker_init_fn=mpidist.checkpoint.ignore_signals``.

    Args:
        group: Native group, or torch group on the backend ``mpidist``; the default group if None.
        signals: Signals to record. With ``signal.SIGINT``, Ctrl-C is a request as well.

    Attributes:
        received: Names of the signals that this rank received, in their order.

    Raises:
        MpidistError: The context is entered outside the main thread; Python runs signal handlers
            in the main thread only.
    """

    def __init__(self, group: AnyGroup = None, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._group = native_group(group)
        self._signals = tuple(signals)
        self._former: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self.received: list[str] = []

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise MpidistError(
                "Preemption must be entered in the main thread: Python runs handlers of signals "
                "there alone. Enter it in the script's main part, and call requested() anywhere; "
                "this is thread "
                f"{threading.current_thread().name!r}"
            )
        for number in self._signals:
            self._former[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *reason: object) -> None:
        while self._former:
            number, handler = self._former.popitem()
            # None: a handler set outside Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def requested(self, also: bool = False) -> bool:
        """Return whether any rank received a signal or passed ``also``; equal on all ranks.

        Collective: over the group, an all-reduce of 4 bytes; call it every few steps.

        Args:
            also: This rank's own reason to stop, for example its time limit.
        """
        wanted = int(bool(self.received) or also)
        if self._group.size == 1:
            return bool(wanted)
        flag = torch.tensor([wanted], dtype=torch.int32, device="cpu")
        self._group.all_reduce(flag, MAX)
        return bool(flag.item())

    def _record(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        is_first = name not in self.received
        self.received.append(name)
        former = self._former.get(number)
        # Called once: a handler that raises must not end a save in progress.
        if is_first and callable(former) and former is not signal.default_int_handler:
            former(number, frame)


def ignore_signals(worker: int = 0) -> None:
    """Ignore the signals of ``Preemption`` in this process; for ``DataLoader(worker_init_fn=…)``.

    A scheduler signals all processes of a job. If SIGTERM ended a worker, the ``DataLoader`` would
    raise before the rank can save.

    Args:
        worker: The worker's number; has no effect.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
