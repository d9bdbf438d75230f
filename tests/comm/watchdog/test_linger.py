"""Linger: the variable, and the commands of a report."""

import pytest

from mpidist.comm.mpi.world import Process
from mpidist.comm.watchdog import linger


def test_the_seconds_are_read():
    for text, seconds in ((None, 0.0), ("", 0.0), (" 600 ", 600.0), ("0.5", 0.5), ("0", 0.0)):
        assert linger.limit_s({} if text is None else {"MPIDIST_LINGER": text}) == seconds


@pytest.mark.parametrize("text", ["-1", "ten", "inf", "nan", "10 s"])
def test_no_number_of_seconds_is_refused(text):
    with pytest.raises(ValueError, match=r"MPIDIST_LINGER needs a number of seconds.*got '"):
        linger.limit_s({"MPIDIST_LINGER": text})


def test_each_process_has_a_command():
    processes = {2: Process(30, "b"), 0: Process(10, "a")}
    assert linger.commands(0.0, processes) == ""
    assert linger.commands(600.0, processes).splitlines()[1:] == [
        "    py-spy dump --pid 10   # rank 0, on a",
        "    py-spy dump --pid 30   # rank 2, on b",
    ]
