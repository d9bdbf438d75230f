"""A job: the clocks of its nodes, what its threads are in, and locks by their stacks."""

import dataclasses
import inspect

from mpidist.comm.recorder.recording import Kind
from mpidist.comm.watchdog.thread_stacks import Line, Stack
from mpidist.reports.job import ENDED, RUNS, STOPPED, Job
from tests.reports.made import WALL_NS, S, collective, entry, job, recording


def test_a_living_job_has_the_time_of_now_and_a_dead_one_its_last():
    entries = [collective(1, 1, 2), collective(2, 3)]
    assert job(entries).now_ns == {0: 20 * S} and job(entries).is_alive
    dead = job(entries, [collective(1, 1, 4)], states=(ENDED, ENDED))
    assert dead.now_ns == {0: 4 * S, 1: 4 * S} and not dead.is_alive
    assert dead.age_s(0, S) == 3.0
    assert job(entries, states=(STOPPED,)).is_alive
    # Stacks that it has written at its timeout.
    late = job(entries, states=(ENDED,), seen_ns={0: WALL_NS + 9 * S})
    assert late.now_ns == {0: 9 * S}


def test_nodes_have_clocks_of_their_own_and_a_wall_clock_that_was_set_changes_no_order():
    here, there = recording(0, [collective(1, 1, 2)]), recording(1, [collective(1, 101, 102)])
    there = dataclasses.replace(there, host="there", started_monotonic_ns=100 * S)
    late = dataclasses.replace(recording(2, []), started_wall_ns=WALL_NS + 999 * S)
    made = Job({0: here, 1: there, 2: late}, dict.fromkeys(range(3), RUNS), {}, {"here": 9 * S})
    assert made.wall_ns(0, S) == made.wall_ns(1, 101 * S) == made.wall_ns(2, S) == WALL_NS + S
    assert made.now_ns == {0: 9 * S, 1: 102 * S, 2: 9 * S}
    assert job([], [], size=4).unknown == (2, 3)


def test_each_thread_is_in_its_innermost_entry():
    inner = collective(3, 3, thread=2)
    made = job([entry(1, Kind.HANDLER, "f", 2, thread=2), inner, entry(4, Kind.STEP, "Adam", 1)])
    assert [each.operation for each in made.innermost(0)] == ["Adam", "all_reduce"]
    assert made.last(0) is None
    assert job([collective(1, 1, 5), collective(2, 2, 3)]).last(0).sequence == 1


def test_stacks_say_which_threads_wait_for_a_lock():
    number = inspect.currentframe().f_lineno + 2
    source = """
    with lock:
    """
    assert source
    stacks = [
        Stack((Line(__file__, number, "f"),), 7, "main"),
        Stack((Line(__file__, 1, "g"),), 8, "other"),
        Stack((), 0),
        Stack((Line("<string>", 1, "g"),), 9, "of a program without a file"),
    ]
    locks = job([], stacks={0: stacks}).locks
    assert locks == {(0, 7): f"tests/reports/test_job.py:{number} in f()", (0, 8): ""}
