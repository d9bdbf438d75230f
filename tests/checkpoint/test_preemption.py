"""Preemption signals: received by one rank, known to all; former handlers restored."""

import os
import signal
import threading

import pytest

from mpidist.checkpoint import (
    REQUEUE_EXIT_CODE,
    Preemption,
    digested_file,
    ignore_signals,
    latest,
    save,
)
from mpidist.errors import MpidistError
from tests.checkpoint.runs import Run
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_all_ranks_stop_at_the_same_step(group):
    numbers = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    default = signal.getsignal(signal.SIGTERM)
    last = group.size - 1
    try:
        with Preemption(group) as preemption:
            agree(group, not preemption.requested())
            agree(
                group,
                preemption.requested(also=group.rank == last) and not preemption.requested(),
                "a rank's own reason",
            )
            if group.rank == last:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR1)
            agree(group, preemption.requested() and preemption.requested())
            agree(group, preemption.received == ["SIGUSR1", "SIGUSR1"] * (group.rank == last))
        agree(
            group,
            numbers == [signal.SIGUSR1] * (group.rank == last),
            "the former handler is called once",
        )
        agree(
            group,
            signal.getsignal(signal.SIGUSR1) is own and signal.getsignal(signal.SIGTERM) is default,
        )
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert REQUEUE_EXIT_CODE == os.EX_TEMPFAIL


def test_a_second_signal_does_not_end_a_save(group, folder, monkeypatch):
    run = Run(group, "adam")
    real = digested_file.write

    def interrupted(path, value):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(path, value)

    with Preemption(group) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        agree(group, preemption.requested())
        monkeypatch.setattr(digested_file, "write", interrupted)
        path = save(folder, 1, **run.state(), group=group)
        agree(group, latest(folder) == path and len(preemption.received) > 1)


def test_entering_in_another_thread_raises_with_the_remedy(group):
    caught = []

    def enter():
        try:
            with Preemption(group):
                pass
        except MpidistError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter, name="other")
    thread.start()
    thread.join()
    agree(group, len(caught) == 1 and "main thread" in caught[0] and "'other'" in caught[0])


def test_a_worker_ignores_what_is_meant_for_the_rank():
    former = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        ignore_signals(0)
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in former)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
