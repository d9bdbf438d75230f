"""Text of the watchdog's report; pure."""

from pathlib import Path

from mpidist.comm.execution.op_status import History
from mpidist.comm.mpi import exited_ranks, job_folder
from mpidist.comm.recorder.recording import Kind
from mpidist.comm.watchdog import process_state, watchdog_report
from mpidist.comm.watchdog.last_operations import LastOperations
from mpidist.comm.watchdog.watchdog_messages import Answer
from tests.comm.watchdog.conftest import Group
from tests.comm.watchdog.test_watchdog import report
from tests.reports.made import collective, entry


def test_a_report_names_operation_process_and_place_of_each_rank(clock, monkeypatch):
    group = Group((4, 0, 2))
    group.journal.enter("barrier")
    group.journal.observe()
    clock[0] += 6
    late = Answer(
        group.journal.snapshot(), ("main thread: train.py:7 in main(), within torch/x.py:3 in y()",)
    )
    text = report(group, {2: late, 4: late})
    assert text.index("rank 0 (world rank 4): in number 1") < text.index(
        "rank 1 (world rank 0): no answer"
    )
    lines = text.splitlines()
    place = "main thread: train.py:7 in main(), within torch/x.py:3 in y()"
    assert lines[2] == f"    process 104 on node4, {place}"
    assert lines[4] == "    process 100 on node0"
    far = Answer([], (f"main thread: {'x' * 70}:1, within {'y' * 70}:2", "mpidist-rpc-a-0: z:3"))
    lines = report(group, {2: late, 4: late, 0: far}).splitlines()
    assert lines[3:8] == [
        "  rank 1 (world rank 0): does not know this group (closed, or not made yet)",
        "    process 100 on node0, main thread:",
        f"      {'x' * 70}:1",
        f"      within {'y' * 70}:2",
        "    mpidist-rpc-a-0: z:3",
    ]
    hostile = Answer(group.journal.snapshot(), ("a: \x1b[2J\nrank 7: fine" + "x" * 10_000,))
    assert report(group, {0: hostile}).count("\n") == 8 and "?[2J?rank 7" in report(
        group, {0: hostile}
    )
    monkeypatch.setattr(exited_ranks, "_exit_times", {0: clock[0]})
    assert "rank 1 (world rank 0): has exited\n" in report(group, {2: late, 4: late})
    left = {0: {group.key: History(0)}}
    text = report(group, {2: late, 4: late}, [0], left)
    assert "rank 1 (world rank 0): has exited, and never called this\n" in text


def test_a_report_has_the_last_operations_of_the_ranks_that_others_wait_for():
    group = Group((4, 0, 2))
    for _ in range(2):
        group.journal.enter("barrier")
    group.journal.observe()

    def answer(sequence, *entries):
        last = LastOperations(entries, worker="w\x1b")
        return Answer(group.journal.snapshot(), (), History(sequence), last)

    call = entry(7, Kind.CALL, "f", -3, peer=2, tag=1)
    answers = {4: answer(2, call), 0: answer(1, collective(1, -9, -8)), 2: answer(2)}
    lines = report(group, answers).splitlines()
    assert lines[-5:] == [
        "  a call waits: w? -> w?",
        "    w? waits 3.0 s for f of w?",
        "    w? has not begun it, or has ended it",
        "  last operations of rank 0:",
        '    all_reduce of "world" (5,) float32: ended 8 s ago',
    ]


def test_a_report_ends_with_the_command_for_the_rest():
    file = job_folder.path_of("job-1") / "recorder-0"
    assert watchdog_report.how_to_read("job-1", file).endswith(": mpidist report job-1\n")
    assert watchdog_report.how_to_read("job-1", Path("/a/b")).endswith(" report --folder /a\n")
    assert watchdog_report.how_to_read("job-1", None) == ""


def test_a_report_has_what_the_kernel_knows_of_silent_and_dead_ranks(monkeypatch):
    group = Group((4, 0, 2))
    group.journal.enter("barrier")
    known = {0: "it is stopped: kill -CONT 100", 2: "it was killed by signal 9 (SIGKILL)"}
    monkeypatch.setattr(
        process_state, "words", lambda process, host: known.get(process.pid - 100, "")
    )
    monkeypatch.setattr(exited_ranks, "_dead", {2})
    lines = report(group, {}).splitlines()
    assert "rank 0 (world rank 4): no answer within 1 s; the process is stopped, dead" in lines[1]
    assert lines[3].endswith("no answer within 1 s; it is stopped: kill -CONT 100")
    assert lines[5].endswith("has died: it was killed by signal 9 (SIGKILL) (process 102 on node2)")
    known[2] = "it has ended: no process 102"
    assert report(group, {}).splitlines()[5].endswith("has died (process 102 on node2)")
