"""Jobs whose ranks die: spares, fewer ranks, the ends of a job. Each job shows many things."""

import gc
import json
import re
import sys

import pytest

from mpidist.cli.launch_request import Request, Site
from mpidist.cli.launcher_options import mpirun_options
from mpidist.comm.mpi.processes import Agreement
from mpidist.elastic.recovery import Recovery, _status_of, _without_frames
from mpidist.elastic.roles import Limits
from mpidist.trace import summary
from tests.tools.support import ROOT, job, launcher, printed, python, short_job, started


class Living:
    """Processes that have what each call of a test returns."""

    rank, size = 2, 3

    def __init__(self, recovery=None):
        self.agreed = []
        self.timers = []
        self.recovery = recovery

    def gather(self, row):
        self.row = row
        return [[process, *row[1:]] for process in range(3)]

    def split(self, number):
        assert number is None
        return None

    def agree(self, is_done, sleep_s, status=None, timeout_s=None):
        self.agreed.append(is_done)
        self.timers.append(self.recovery._deadline._timer)
        return Agreement(len(self.agreed) == 3)

    def shrunk(self):
        return self


def test_a_spare_that_is_left_waits_without_a_limit():
    living = Living()
    living.recovery = recovery = Recovery(living, 1)
    warmed, frozen = [], gc.get_freeze_count()
    assert recovery.run(list, lambda: warmed.append(1), Limits(), 30.0) is None
    assert living.agreed == [True] * 3 and warmed == [1]
    # Not even while others are trained with again.
    assert living.timers == [None] * 3 and recovery._deadline._timer is None
    # pytest's own modules, of tests/conftest.py.
    assert gc.get_freeze_count() >= frozen > 0


@pytest.mark.parametrize(
    ("number", "agreement", "found"),
    [
        (0, Agreement(True, 75), "exit 75"),
        # The others do not come in time.
        (0, None, "exit 75"),
        # Its training has ended.
        (1, Agreement(True, 75), "result"),
        # A spare.
        (2, Agreement(True, 75), "exit 75"),
        (2, Agreement(True, 0), None),
    ],
)
def test_a_rank_that_exits_ends_the_spares(monkeypatch, number, agreement, found):
    asked = []

    class Exiting(Living):
        rank = number

        def agree(self, is_done, sleep_s, status=None, timeout_s=None):
            asked.append((is_done, status, timeout_s is not None))
            return agreement

    def train():
        if number == 0:
            sys.exit(75)
        return "result"

    monkeypatch.setattr(Recovery, "_enters_world", lambda recovery: number < 2)
    recovery = Recovery(Exiting(), 1)
    try:
        ended = recovery.run(train, list, Limits(), 30.0)
    except SystemExit as error:
        ended = f"exit {error.code}"
    assert ended == found
    assert asked == [(True, 75 if number == 0 else None, number == 0)]


def test_the_status_of_an_exit():
    codes = (None, 0, 75, -1, 256, "a text")
    assert [_status_of(SystemExit(code)) for code in codes] == [0, 0, 75, 255, 0, 1]


def test_an_error_loses_its_frames():
    def raises():
        try:
            raise KeyError
        except KeyError:
            raise ValueError from TypeError().with_traceback(sys.exc_info()[2])

    try:
        raises()
    except ValueError as error:
        found = _without_frames(error)
    for link in (found, found.__cause__, found.__context__):
        assert link.__traceback__ is None


_ULFM = ("--with-ft", "ulfm")

_LIFE = """
    import json, os, signal, sys, time
    from pathlib import Path
    from mpidist import elastic
    from mpidist.comm.mpi import runtime
    from tests.elastic.training import Training, dies_at

    def trained(name, where, kind="oss", **more):
        folder = Path(FOLDER, name)
        folder.mkdir(exist_ok=True)
        # The ranks take their time in one of the runs, or the spares' waits are shorter than what
        # they do before them.
        dies = (lambda *at: time.sleep(0.05)) if name == "straight" else dies_at(where, folder)
        training = Training(kind, folder, 20, dies)
        cpu_s, begin = time.process_time(), time.monotonic()
        found = elastic.run(training, timeout_s=20, **more)
        own = {"run": name, "starts": training.starts, "sizes": training.sizes}
        used = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.monotonic() - begin}
        print(json.dumps({**own, **used, "found": found}), flush=True)

    enter, entered = runtime.enter_world, []

    def enters(*args):
        # A spare that dies while the others begin the new world with it.
        entered.append(enter(*args))
        if os.environ.get("DIES") == "1" and len(entered) == 1 and runtime.world().rank == 1:
            mark = Path(FOLDER, "died-entering")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    trained("straight", {}, warm=lambda: None)
    runtime.enter_world = enters
    os.environ["DIES"] = "1"
    trained("killed", {1: 13}, max_failures=2)
    os.environ["DIES"] = "0"
    trained("torch", {}, "torch")
    trained("torch killed", {0: 14}, "torch")
    trained("fewer", {2: 6})
    trained("too few", {1: 6}, min_ranks=2)
"""


@pytest.mark.slow
def test_a_job_outlives_its_ranks_until_too_few_are_left(tmp_path):
    text = _LIFE.replace("FOLDER", repr(str(tmp_path)))
    env = {"MPIDIST_SPARES": "3", "MPIDIST_JOB": f"test-{tmp_path.name}-{id(tmp_path)}"}
    done = short_job(6, text, *_ULFM, env=env)
    output = done.stdout + done.stderr
    assert done.returncode == 75, output
    runs = {}
    for line in map(json.loads, filter(None, done.stdout.splitlines())):
        runs.setdefault(line["run"], []).append(line)
    found = {
        name: {line["found"]["rank"]: line["found"]["digest"] for line in lines if line["found"]}
        for name, lines in runs.items()
    }
    # No death: spares sleep, and return None.
    assert set(found["straight"]) == {0, 1, 2}
    idle = [line for line in runs["straight"] if line["found"] is None]
    assert len(idle) == 3
    assert all(line["cpu_s"] < 0.05 + 0.1 * line["wall_s"] for line in idle), idle
    # A rank dies, and the spare that takes its place, in the recovery. The same bits.
    assert found["killed"] == found["straight"], output
    starts = sorted(line["starts"] for line in runs["killed"] if line["found"])
    assert starts == [[0, 12], [0, 12], [12]]
    assert "goes on after the death of rank 1: a spare takes the place of rank 1" in done.stderr
    # A later run goes on with those that live. torch's groups, and rank 0, too.
    assert found["torch killed"] == found["torch"] and set(found["torch"]) == {0, 1, 2}, output
    # No spare is left: two ranks go on from a commit of three.
    assert set(found["fewer"]) == {0, 1}
    assert all(line["sizes"] == [3, 2] and line["starts"] == [0, 4] for line in runs["fewer"])
    assert "death of rank 2: 2 ranks go on; 0 spares left" in done.stderr
    # Too few: the last one tells it.
    assert "too few" not in runs
    assert "with status 75: 5 of its 6 processes have died, and 1 of at least 2" in done.stderr


_SERVES = """
    import operator, os, signal, threading
    from pathlib import Path
    import mpidist.comm
    import mpidist.rpc
    from mpidist import elastic

    before = []

    def train():
        names = [thread.name for thread in threading.enumerate()]
        before.append(sum(name.startswith("mpidist-rpc-") for name in names))
        world = mpidist.comm.init()
        mpidist.rpc.init_rpc(f"worker{world.rank}")
        if world.rank == 0:
            # It serves the others while it waits for their ends.
            return "served"
        total = 0
        for step in range(100):
            total += mpidist.rpc.rpc_sync("worker0", operator.add, (step, 1))
            mark = Path(FOLDER, "died")
            if world.rank == 1 and step == 50 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return total

    print(elastic.run(train, timeout_s=20), before, flush=True)
"""


@pytest.mark.slow
def test_rpc_that_is_left_running_serves_the_others_until_they_end_or_die(tmp_path):
    text = _SERVES.replace("FOLDER", repr(str(tmp_path)))
    done = short_job(4, text, *_ULFM, env={"MPIDIST_SPARES": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    # No thread of it is left in the next world.
    expected = ["5050 [0, 0]", "5050 [0]", "served [0, 0]"]
    assert sorted(done.stdout.splitlines()) == expected, done.stdout + done.stderr


_ERROR = """
    import os, signal, sys, time
    import mpidist.comm
    from mpidist import elastic

    def train():
        world = mpidist.comm.init()
        if world.rank == 1 and HOW == "error":
            raise KeyError("of the program")
        if world.rank == 1 and HOW == "stuck":
            os.kill(os.getppid(), 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        if world.rank == 2 and HOW == "stuck":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    elastic.run(train, timeout_s=1.0)
    print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("error", "KeyError: 'of the program'"),
        ("stuck", "did not end within 1 s: another rank is stuck"),
    ],
)
def test_what_is_no_death_ends_the_job(how, words):
    done = short_job(3, _ERROR.replace("HOW", repr(how)), *_ULFM)
    assert done.returncode not in (0, 75), done.stdout + done.stderr
    assert words in done.stderr and "ended" not in done.stdout, done.stdout + done.stderr


_EXITS = """
    import sys
    import mpidist.comm
    from mpidist import elastic

    def train():
        mpidist.comm.init().barrier()
        sys.exit(75)

    elastic.run(train)
"""


@pytest.mark.slow
def test_ranks_that_exit_end_the_job_and_its_spares():
    done = short_job(3, _EXITS, *_ULFM, env={"MPIDIST_SPARES": "1"})
    assert done.returncode == 75, done.stdout + done.stderr


@pytest.mark.slow
def test_more_spares_than_ranks_are_an_error_of_all_that_ends_the_job():
    done = short_job(3, _EXITS, *_ULFM, env={"MPIDIST_SPARES": "2"})
    assert done.returncode == 1, done.stdout + done.stderr
    for process in range(3):
        assert f"process {process} of 3: run: 2 spares leave 1 ranks" in done.stderr, done.stderr
    assert "MPI_ABORT" not in done.stderr


_STOPPED = """
    import os, signal, time
    from pathlib import Path
    import mpidist.comm
    from mpidist import elastic

    def train():
        world = mpidist.comm.init()
        mark = Path(FOLDER, "stopped")
        if world.rank == 1 and not mark.exists():
            mark.write_text(f"{os.getpid()} {time.time()}")
            END
        if world.rank == 0:
            # A rank that computes for longer than the detector's limit is not dead.
            time.sleep(2.0)
        world.barrier()
        pid, at = mark.read_text().split()
        assert not Path("/proc", pid).exists()
        return world.rank, time.time() - float(at)

    print(elastic.run(train), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    # The launcher's status is that of a process which has ended itself.
    ("end", "status"),
    [("os.kill(os.getpid(), signal.SIGSTOP)", 0), ("os._exit(5)", 5)],
)
def test_with_heartbeats_a_spare_takes_the_place_of_a_rank_that_sends_none(tmp_path, end, status):
    request = Request((), ulfm=True, heartbeat=True)
    site = Site("openmpi", "Open MPI v5.0.11", "", "", "", (), 8, is_root=False)
    options = mpirun_options(request, site, {}, 3, {})
    options = options[options.index("--with-ft") :]
    text = _STOPPED.replace("FOLDER", repr(str(tmp_path))).replace("END", end)
    done = short_job(3, text, *options, env={"MPIDIST_SPARES": "1"})
    assert done.returncode == status, done.stdout + done.stderr
    assert "death of rank 1: a spare takes the place of rank 1" in done.stderr, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:3] for line in lines] == ["(0,", "(1,"], done.stdout


@pytest.mark.slow
def test_the_example_and_the_page(tmp_path):
    """A rank of the example dies, and its loss is that of a run without a death."""
    env = {"MPIDIST_SPARES": "1", "MPIDIST_JOB": f"test-{tmp_path.name}-{id(tmp_path)}"}

    def ran(*words, **variables):
        command = [*launcher(4, *_ULFM), *python(), *words]
        done = started(command, 90, {**env, **variables})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    example = str(ROOT / "examples" / "elastic_training.py")
    straight = ran(example, "--checkpoint", str(tmp_path / "straight"))
    trace = tmp_path / "run.json"
    killed = ran(
        example, "--checkpoint", str(tmp_path / "killed"), "--kill", "1", MPIDIST_TRACE=str(trace)
    )
    assert straight[0] == "step 0 on 3 ranks" and straight[-1] == killed[-1]
    assert killed[:-1] == ["step 0 on 3 ranks", "step 30 on 3 ranks"]
    # The survivors' parts of the world that has ended, and the next world as a whole.
    parts = sorted(path.name for path in tmp_path.glob("run*"))
    assert parts == ["run-rank0.json", "run-rank2.json", "run.json"]
    assert [len(summary.read(tmp_path / part).ranks) for part in parts] == [1, 1, 3]
    page = (ROOT / "docs" / "when-ranks-die.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    folder = repr(str(tmp_path / "page"))
    printed = ran("-c", program.replace('"checkpoints"', folder))
    assert sorted(printed) == ["0", "1", "2", "None"]


_MANY = """
    import json, os, resource
    from pathlib import Path
    from mpidist import elastic
    from mpidist.comm.mpi import job_folder, mpi_errors
    from mpidist.comm.mpi.processes import Processes
    from mpidist.errors import RankFailureError
    from tests.elastic.training import Training

    RECOVERIES = 50
    mpi_errors._NEWS_S = 0.05  # no news of a death will come
    shrunk, counts = Processes.shrunk, []

    def with_one_less(processes):
        # The death is pretended: as many processes live, and the recovery is that of a death.
        found = shrunk(processes)
        processes.size += 1
        return found

    class Counted(Training):
        def __call__(self):
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            job = os.environ["MPIDIST_JOB"]
            files = sum(job in str(path) for path in job_folder.MEMORY.rglob("*"))
            counts.append((resident * resource.getpagesize() / 2**20, files))
            return super().__call__()

    def dies(rank, step):
        start = len(training.starts)
        if start <= RECOVERIES and step == 5 and rank == start % 3:
            raise RankFailureError("pretended", [(rank + 1) % 3])

    Processes.shrunk = with_one_less
    training = Counted("oss", Path(FOLDER), 12, dies)
    found = elastic.run(training, timeout_s=20)
    print(json.dumps({**found, "counts": training.counts, "more": counts}), flush=True)
"""


@pytest.mark.long
def test_fifty_recoveries_of_one_job_leave_nothing(tmp_path):
    text = _MANY.replace("FOLDER", repr(str(tmp_path)))
    env = {"MPIDIST_JOB": f"test-{tmp_path.name}-{id(tmp_path)}"}
    lines = printed(job(3, text, *_ULFM, env=env, timeout_s=200))
    assert set(lines) == {0, 1, 2}
    for line in lines.values():
        assert len(line["counts"]) == 51
        # From the first tenth on. A timer's thread may still be about to end.
        early, late = line["counts"][5:10], line["counts"][-5:]
        assert min(late)[0] <= min(early)[0] and late[-1][1] <= early[-1][1] + 4, str(line)
        (memory, files), (memory_late, files_late) = line["more"][5], line["more"][-1]
        assert files_late <= files and memory_late < memory + 20, str(line["more"])
