"""Child job: its launcher, its environment, its end, and the reason of a failure."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpidist.comm.discovery import child_job


def test_processes_that_a_launcher_detaches_are_ended(tmp_path):
    # As with MPICH's launcher, the rank is in a session of its own and its parent has exited.
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.close(1)\n    "
        "os.close(2)\n    time.sleep(60)\n"
    )
    marks = []
    original = child_job._processes_marked

    def watched(mark):
        found = list(original(mark))
        marks.append(len(found))
        return iter(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_job, "_processes_marked", watched)
        assert child_job.run([sys.executable, "-S", "-c", code], lambda line: True, 20.0) == ""
    assert marks[0] == 1 and marks[-1] == 0


def test_jobs_of_other_threads_are_ended_with_their_process(monkeypatch):
    monkeypatch.setattr(child_job, "_ending", threading.Event())
    begun, pids = threading.Event(), []

    def on_line(line):
        pids.append(int(line))
        begun.set()
        return True

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            child_job.run, ["sh", "-c", "echo $$; exec sleep 600"], on_line, 500.0
        )
        assert begun.wait(60)
        child_job.end_all()
        assert running.result(30) == "ended with this process"
        # One that would follow ends at once.
        assert child_job.run(["sleep", "600"], on_line, 500.0) == "ended with this process"
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_command_that_cannot_be_executed_is_reported_and_not_raised(tmp_path):
    assert "No such file" in child_job.run([str(tmp_path / "mpirun")], bool, 1.0)


def test_the_launcher_above_the_library_comes_first(tmp_path, monkeypatch):
    for folder in ("mpi/bin", "mpi/lib", "path"):
        (tmp_path / folder).mkdir(parents=True)
    for program in ("mpi/bin/mpiexec", "path/mpirun"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(child_job.sys, "executable", str(tmp_path / "nowhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(
        child_job, "library_files", lambda: [tmp_path / "mpi" / "lib" / "libmpi.so.12"]
    )
    assert child_job.launcher("MPICH Version: 5") == [str(tmp_path / "mpi/bin/mpiexec"), "-n", "2"]
    monkeypatch.setattr(child_job, "library_files", list)
    assert child_job.launcher("Open MPI v5")[:2] == [
        str(tmp_path / "path/mpirun"),
        "--oversubscribe",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert child_job.launcher("Open MPI v5") is None


def test_the_ranks_find_the_modules_that_this_process_finds(monkeypatch):
    monkeypatch.syspath_prepend("relative")
    variables = child_job.environment({"PYTHONPATH": "lost", "PMI_RANK": "0"}, is_root=True)
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == os.path.abspath("relative")
    assert variables["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert "PMI_RANK" not in variables and variables["HOME"]
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in child_job.environment({}, is_root=False)


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (0, "Error: ignored", ""),
        (-signal.SIGSEGV, "", "ended by signal 11 (SIGSEGV)"),
        (128 + signal.SIGKILL, "", "ended by signal 9 (SIGKILL)"),
        (1, "rank 0 exited on Signal: 6", "ended by signal 6 (SIGABRT)"),
        (2, "a\nbuiltins.ValueError: b\nc", "ended with exit status 2: builtins.ValueError: b"),
        (3, "-" * 30 + "\n one\n two\n three\n four\n" + "=" * 30 + "\nmpirun's own",
         "ended with exit status 3: two / three / four"),
        (4, "", "ended with exit status 4: "),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_the_ranks_own(code, output, reason):
    assert child_job._exit_reason(code, output.split("\n")) == reason


def test_lines_that_are_no_progress_are_kept_for_the_reason():
    code = "import sys; print('line 0'); print('ValueError: odd'); print('line 1'); sys.exit(3)"
    seen = []

    def on_line(line):
        seen.append(line)
        return line.startswith("line")

    reason = child_job.run([sys.executable, "-S", "-c", code], on_line, 30.0)
    assert reason == "ended with exit status 3: ValueError: odd"
    assert seen[:3] == ["line 0", "ValueError: odd", "line 1"]


def test_answers_are_what_stands_behind_the_marker(monkeypatch):
    commands, ending = [], ""

    def run(command, on_line, silence_s):
        commands.append(command)
        is_progress = [on_line(line) for line in ("noise", "[1] mark one ", "mark two")]
        assert is_progress == [False, True, True] and silence_s == 7.0
        return ending

    monkeypatch.setattr(child_job, "run", run)
    monkeypatch.setattr(child_job, "launcher", lambda library: [f"{library}/mpirun", "-n", "2"])
    texts, failure = child_job.answers("MPI", "a.module", "mark", 7.0, wrong="one and one is two")
    assert (texts, failure) == (["one", "two"], "MPI/mpirun: one and one is two")
    assert commands == [["MPI/mpirun", "-n", "2", sys.executable, "-m", "a.module"]]
    ending = "hung"
    assert child_job.answers("MPI", "a.module", "mark", 7.0)[1] == "MPI/mpirun: hung"
    monkeypatch.setattr(child_job, "launcher", lambda library: None)
    assert child_job.answers("MPI", "a.module", "mark", 7.0) == ([], child_job.NO_LAUNCHER)
