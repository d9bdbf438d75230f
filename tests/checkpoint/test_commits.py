"""Commits: equal bits after a load, the newest of memory and disk, lost nodes, failed commits."""

import errno
import json
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch

from mpidist.checkpoint import commit, commits, digested_file, load, save
from mpidist.checkpoint.commits import _whole
from mpidist.checkpoint.manifest import MODEL, TRAINING, Contents, Entry, Manifest, to_json
from mpidist.checkpoint.slots import Slots
from mpidist.comm.mpi import job_folder, runtime
from mpidist.errors import CheckpointError, DisagreementError, ReplicaError
from tests.checkpoint.runs import Run
from tests.tools.support import agree, printed, raises_on_all
from tests.tools.support import short_job as run
from tests.zero.stateful import same

KINDS = ["adam", "own", "oss-greedy", "oss-flat", "powersgd", "torch", "fsdp"]


@pytest.fixture
def memory(group, folder, monkeypatch):
    """Return this rank's node memory, a folder; all ranks share one node."""
    return _simulated(folder / "memory", group, monkeypatch)


@pytest.fixture
def node_memory(group, folder, monkeypatch):
    """Return this rank's node memory, a folder; each rank is a node."""
    monkeypatch.setattr(runtime.World, "nodes_of", lambda self, ranks: tuple(range(len(ranks))))
    return _simulated(folder / f"memory{group.rank}", group, monkeypatch)


def _simulated(path, group, monkeypatch):
    path.mkdir(exist_ok=True)
    monkeypatch.setattr(job_folder, "MEMORY", path)
    monkeypatch.setattr(job_folder, "_jobs", {})
    monkeypatch.setenv("MPIDIST_JOB", "test")
    group.barrier()
    return path


@pytest.fixture(autouse=True)
def _ends():
    yield
    commits._drop()


def _goes_on(group, folder, kind, straight, step):
    """Train on, load into a new run, train that, and compare."""
    expected = straight.train(8)  # into the next epoch
    resumed = Run(group, kind, seed=7)
    resumption = load(folder, **resumed.state(), group=group)
    found = None if resumption is None else resumption.step
    agree(group, found == step, f"loaded {found}")
    agree(group, resumption.saved_by == group.size)
    agree(group, resumed.train(8) == expected, "other losses")
    agree(group, same(resumed.tensors(), straight.tensors()), "other weights or buffers")
    agree(group, same(resumed.moments(), straight.moments()), "other moments")
    return resumption


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group", "memory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_memory_with_the_same_bits(group, folder, kind):
    straight = Run(group, kind)
    straight.train(2)
    commit(folder, straight.step, **straight.state(), group=group)
    straight.train(2)
    commit(folder, straight.step, **straight.state(), extra={"best": [0.5]}, group=group)
    resumption = _goes_on(group, folder, kind, straight, 4)
    agree(group, resumption.extra == {"best": [0.5]} and resumption.path.name == "slot-1")


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_node_gets_its_state_from_the_others(group, folder, node_memory, kind):
    straight = Run(group, kind)
    straight.train(2)
    commit(folder, straight.step, **straight.state(), group=group)
    straight.train(2)
    commit(folder, straight.step, **straight.state(), group=group)
    commits._of(group, folder)._finish_sending("test")
    group.barrier()
    if group.rank == 1:
        shutil.rmtree(node_memory)
        node_memory.mkdir()
        job_folder._jobs.clear()
        commits._commits.clear()
    else:
        commits._commits.clear()
    _goes_on(group, folder, kind, straight, 4)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("default_group", "node_memory")
@pytest.mark.parametrize("kind", ["adam", "oss-flat", "powersgd", "fsdp"])
def test_another_number_of_ranks_loads_as_from_the_disk(group, folder, kind):
    straight = Run(group, kind)
    straight.train(2)
    path = save(folder, 2, **straight.state(), group=group)
    commit(folder, 3, **straight.state(), group=group)
    commits._of(group, folder)._finish_sending("test")
    fewer = group.new_group(range(group.size - 1), "fewer") if group.rank < group.size - 1 else None
    wrong = ""
    if fewer is not None:
        one = Run(fewer, "adam" if kind == "fsdp" else kind, seed=5)
        if kind == "fsdp":
            words = f"holds DTensors as {group.size} ranks had them"
            raises_on_all(
                fewer, CheckpointError, lambda: load(folder, **one.state(), group=fewer), words
            )
        else:
            other = Run(fewer, kind, seed=6)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = load(folder, **one.state(), group=fewer)
                torch.manual_seed(group.rank)
                losses = one.train(4)
                load(path, **other.state(), group=fewer)
                torch.manual_seed(group.rank)
            wrong += "step " * ((found.step, found.saved_by) != (3, group.size))
            wrong += "losses " * (losses != other.train(4))
            wrong += "tensors " * (not same(one.tensors(), other.tensors()))
            wrong += "moments " * (not same(one.moments(), other.moments()))
            commit(folder, 7, **one.state(), group=fewer)
            wrong += "next " * (load(folder, **other.state(), group=fewer).step != 7)
        fewer.close()
    agree(group, not wrong, wrong)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("node_memory")
def test_a_commit_of_which_files_are_lost_is_passed_over(group, folder):
    straight = Run(group, "oss-flat")
    straight.train(2)
    commit(folder, 2, **straight.state(), group=group)
    straight.train(2)
    commit(folder, 4, **straight.state(), group=group)
    made = commits._of(group, folder)
    made._finish_sending("test")
    group.barrier()
    lost = f"rank-1-of-{group.size}.pt"
    (made.slots.path(1) / lost).unlink(missing_ok=True)
    group.barrier()
    again = Run(group, "oss-flat", seed=7)
    resumption = load(folder, **again.state(), group=group)
    agree(group, resumption.step == 2, str(resumption))
    again.train(2)
    commit(folder, 4, **again.state(), group=group)
    agree(group, load(folder, **again.state(), group=group).step == 4)
    agree(group, same(again.tensors(), straight.tensors()), "other weights")


@pytest.mark.mpi
@pytest.mark.usefixtures("memory")
def test_the_newest_of_memory_and_disk_is_loaded(group, folder):
    state = Run(group, "adam").state()
    agree(group, load(folder, **state, group=group) is None)
    found = []
    for step, write in ((1, save), (2, commit), (3, save), (4, commit), (5, commit)):
        write(folder, step, **state, group=group)
        found.append(load(folder, **state, group=group).step)
    agree(group, found == [1, 2, 3, 4, 5], str(found))
    agree(group, load(folder / "step-3", **state, group=group).step == 3)
    agree(group, load(folder / "other", **state, group=group) is None)


@pytest.mark.mpi
@pytest.mark.usefixtures("memory")
def test_a_failed_commit_leaves_the_ones_before(group, folder, monkeypatch):
    state = Run(group, "oss-flat").state()
    commit(folder, 1, **state, group=group)
    commit(folder, 2, **state, group=group)
    write = digested_file.overwrite

    def full(path, value):
        if group.rank == group.size - 1 and path.name.startswith("rank"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, value)

    monkeypatch.setattr(digested_file, "overwrite", full)
    words = "No space left on device"
    raises_on_all(group, CheckpointError, lambda: commit(folder, 3, **state, group=group), words)
    monkeypatch.setattr(digested_file, "overwrite", write)
    agree(group, load(folder, **state, group=group).step == 2)
    commit(folder, 3, **state, group=group)
    agree(group, load(folder, **state, group=group).step == 3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("node_memory")
def test_a_copy_that_cannot_be_written_is_an_error_of_all_ranks(group, folder, monkeypatch):
    state = Run(group, "oss-flat").state()
    receive = commits._receive

    def full(sending, path, *rest):
        receive(sending, path, *rest)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if group.rank == 0:
        monkeypatch.setattr(commits, "_receive", full)
    commit(folder, 1, **state, group=group)
    words = "commit of step 2, copies of the last commit: rank 0: OSError: [Errno 28] No space left"
    raises_on_all(group, CheckpointError, lambda: commit(folder, 2, **state, group=group), words)
    monkeypatch.setattr(commits, "_receive", receive)
    commit(folder, 2, **state, group=group)
    agree(group, load(folder, **state, group=group).step == 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("default_group", "node_memory")
def test_a_file_that_is_removed_before_its_copy_is_sent(group, folder, monkeypatch):
    straight = Run(group, "oss-flat")
    straight.train(2)
    finish = Slots.commit

    def removes(slots, slot, written):
        finish(slots, slot, written)
        (slots.path(slot) / f"rank-{group.rank}-of-{group.size}.pt").unlink()

    monkeypatch.setattr(Slots, "commit", removes)
    commit(folder, 2, **straight.state(), group=group)
    monkeypatch.setattr(Slots, "commit", finish)
    commits._of(group, folder)._finish_sending("test")
    # Each rank's state is on the next node alone.
    _goes_on(group, folder, "oss-flat", straight, 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("node_memory")
def test_a_file_that_is_removed_within_the_commit_is_an_error_of_all_ranks(
    group, folder, monkeypatch
):
    state = Run(group, "oss-flat").state()
    commit(folder, 1, **state, group=group)
    write = digested_file.overwrite

    def removes(path, value):
        entry = write(path, value)
        if group.rank == group.size - 1 and path.name.startswith("rank"):
            path.unlink()
        return entry

    monkeypatch.setattr(digested_file, "overwrite", removes)
    words = f"commit of step 2: rank {group.size - 1}: FileNotFoundError"
    raises_on_all(group, CheckpointError, lambda: commit(folder, 2, **state, group=group), words)
    monkeypatch.setattr(digested_file, "overwrite", write)
    agree(group, load(folder, **state, group=group).step == 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("node_memory")
def test_a_file_that_is_removed_within_the_load_is_an_error_of_all_ranks(
    group, folder, monkeypatch
):
    state = Run(group, "oss-flat").state()
    commit(folder, 1, **state, group=group)
    made = commits._of(group, folder)
    made._finish_sending("test")
    group.barrier()
    own = f"rank-{group.rank}-of-{group.size}.pt"
    (made.slots.path(0) / own).unlink()
    group.barrier()
    found = commits._of(group, folder).held()
    for path in made.slots.path(0).glob("rank-*"):
        path.unlink()
    group.barrier()
    words = "checkpoint.load: rank 0: FileNotFoundError"
    raises_on_all(group, CheckpointError, lambda: found.bring([own]), words)


@pytest.mark.mpi
@pytest.mark.usefixtures("memory")
def test_a_job_whose_memory_is_removed_commits_anew(group, folder):
    state = Run(group, "oss-flat").state()
    commit(folder, 1, **state, group=group)
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(job_folder.path_of(runtime.world().job))
    group.barrier()
    agree(group, load(folder, **state, group=group) is None)
    commit(folder, 2, **state, group=group)
    agree(group, load(folder, **state, group=group).step == 2)


def test_a_file_that_cannot_be_received_leaves_no_part(tmp_path):
    path = tmp_path / "rank-0-of-1.pt"
    path.with_name(f"{path.name}.part").symlink_to("/dev/full")
    group = SimpleNamespace(recv=lambda content, source, tag: None)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        commits._receive(group, path, 10, 0, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi(min_size=2)
def test_a_load_without_room_is_an_error_of_all_ranks(group, folder, node_memory, monkeypatch):
    state = Run(group, "oss-flat").state()
    commit(folder, 1, **state, group=group)
    commits._of(group, folder)._finish_sending("test")
    group.barrier()
    receive = commits._receive

    def full(sending, path, *rest):
        receive(sending, path, *rest)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    commits._commits.clear()
    if group.rank == 1:
        shutil.rmtree(node_memory)
        node_memory.mkdir()
        job_folder._jobs.clear()
        monkeypatch.setattr(commits, "_receive", full)
    words = "checkpoint.load: rank 1: OSError: [Errno 28] No space left on device: '/"
    raises_on_all(group, CheckpointError, lambda: load(folder, **state, group=group), words)
    monkeypatch.setattr(commits, "_receive", receive)
    agree(group, load(folder, **state, group=group).step == 1)


@pytest.mark.mpi
@pytest.mark.usefixtures("memory")
def test_wrong_commits_are_refused_on_all_ranks(group, folder):
    state = Run(group, "adam").state()
    commit(folder, 2, **state, group=group)
    for step, error, words in (
        (2, CheckpointError, "holds a commit of step 2"),
        (1, CheckpointError, "load it first, or remove it with `mpidist clean`"),
        (-1, ValueError, "step must be at least 0"),
        ("3", TypeError, "step must be an int"),
    ):
        raises_on_all(
            group, error, lambda step=step: commit(folder, step, **state, group=group), words
        )
    raises_on_all(
        group, TypeError, lambda: commit(folder, 3, **state, extra=object(), group=group), "extra"
    )
    if group.size > 1:
        raises_on_all(
            group,
            DisagreementError,
            lambda: commit(folder, 3 + group.rank, **state, group=group),
            "step",
        )
    other = Run(group, "adam", width=14).state()
    agree(group, load(folder, **state, group=group).step == 2)
    words = "holds a commit of step 2"
    raises_on_all(group, CheckpointError, lambda: commit(folder, 2, **state, group=group), words)
    words = "of another model"
    raises_on_all(group, CheckpointError, lambda: load(folder, **other, group=group), words)
    agree(group, load(folder, **state, group=group).step == 2)
    # To a process that has written none, the commit is what an earlier start has left.
    for is_left in (False, True):
        group.barrier()
        if is_left:
            commits._drop()
        with pytest.raises(CheckpointError) as caught:
            load(folder, **other, group=group)
        named = "remove it with `mpidist clean`" in str(caught.value)
        agree(group, words in str(caught.value) and named == is_left, str(caught.value))
    agree(group, load(folder, **state, group=group).step == 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("memory")
def test_a_replica_with_a_flipped_bit_is_named(group, folder):
    run = Run(group, "adam")
    run.train(1)
    commit(folder, 1, **run.state(), group=group)
    run.train(1)
    weight = run.model.module[0].weight.detach().view(torch.int32)
    if group.rank == group.size - 1:
        weight[1, 2] ^= 1 << 7

    named = []

    def fails():
        try:
            commit(folder, 2, **run.state(), group=group)
        except ReplicaError as error:
            named.extend(error.ranks)
            raise

    raises_on_all(group, ReplicaError, fails, "parameters of" if group.size > 2 else "no majority")
    agree(group, named == list(group.world_ranks[-1:] if group.size > 2 else group.world_ranks))
    agree(group, load(folder, **run.state(), group=group).step == 1)
    commit(folder, 2, **run.state(), group=group)


def test_what_makes_a_commit_whole():
    entry = Entry(1, "0" * 64)
    own = [f"rank-{rank}-of-2.pt" for rank in range(2)]
    text = to_json(
        Manifest(3, 2, dict.fromkeys([MODEL, TRAINING, *own], entry), Contents(rng=True))
    )
    whole, first = {MODEL, TRAINING, *own}, {MODEL, TRAINING, own[0]}
    nodes = (0, 1)
    assert _whole([whole, whole], [text, text], nodes, 0)[0] == [whole, whole]
    assert _whole([first, {own[1]}], [text, text], nodes, 1)[0] == [first, {own[1]}]
    assert _whole([first, set()], [text, None], nodes, 1) is None
    assert _whole([whole, set()], [text, None], nodes, 1)[0] == [whole, set()]
    # The first node has lost what nodes hold once: it takes both from the other one.
    assert _whole([{MODEL, *own}, whole], [text, text], nodes, 0)[0] == [set(own), whole]
    assert _whole([{MODEL, own[0]}, {MODEL, own[1]}], [text, text], nodes, 0) is None


_RUN = """
    import json, os, signal, sys
    import torch
    import mpidist.comm
    from mpidist.checkpoint import commit, load
    from mpidist.ddp import DistributedDataParallel
    from mpidist.optim import OSS

    world = mpidist.comm.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
    state = dict(model=model, optimizer=optimizer)
    resumed = load(FOLDER, **state)
    start = 0 if resumed is None else resumed.step
    for step in range(start, 6):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(step + world.rank))).sum().backward()
        optimizer.step()
        commit(FOLDER, step + 1, **state)
        if step == DIES and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = [value.tolist() for value in model.module.parameters()]
    print(json.dumps({"rank": world.rank, "start": start, "weights": weights}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["MPIDIST_JOB", "PBS_JOBID"])
def test_a_killed_job_goes_on_from_the_memory_of_its_node(tmp_path, variable):
    name = f"test-{tmp_path.name}-{id(tmp_path)}"
    env = {variable: name}

    def started(folder, dies):
        text = _RUN.replace("FOLDER", repr(str(tmp_path / folder))).replace("DIES", str(dies))
        return run(2, text, env=env)

    straight = printed(started("straight", -1))
    assert not list(job_folder.MEMORY.glob(f"mpidist-*-{name}"))  # a good end
    killed = started("run", 3)
    assert killed.returncode != 0
    assert list(job_folder.MEMORY.glob(f"mpidist-*-{name}"))
    resumed = printed(started("run", -1))
    assert {line["start"] for line in resumed.values()} <= {3, 4}
    assert [resumed[rank]["weights"] for rank in (0, 1)] == [
        straight[rank]["weights"] for rank in (0, 1)
    ]
    assert not list(job_folder.MEMORY.glob(f"mpidist-*-{name}"))
    assert torch.tensor(resumed[0]["weights"][0]).isfinite().all()
    # Of the killed start of a batch job, whose later starts have their own.
    left = list(job_folder.MEMORY.glob(f"mpidist-*-{name}.*"))
    assert len(left) == (variable == "PBS_JOBID")
    for folder in left:
        assert {path.name for path in folder.iterdir()} > {"recorder-0", "recorder-1"}
        shutil.rmtree(folder)


_SPARE = """
    import json, os, signal, time
    import torch
    from mpi4py import MPI
    import mpidist.comm
    from mpidist.checkpoint import commit, digested_file, load
    from mpidist.ddp import DistributedDataParallel
    from mpidist.errors import MpidistError
    from mpidist.optim import OSS

    whole = MPI.COMM_WORLD.Dup()
    whole.Set_errhandler(MPI.ERRORS_RETURN)
    ranks = whole.size - 1
    number = whole.rank if whole.rank < ranks else -1  # the last one is a spare
    is_doomed = number == DEAD
    end, write, step = FOLDER + "/end", digested_file.overwrite, 0

    def dies(where):
        if where == WHERE and is_doomed and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    def written(path, value):
        dies("commit")
        return write(path, value)

    digested_file.overwrite = written

    def train(comm):
        global step
        world = mpidist.comm.init(comm=comm)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
        state = dict(model=model, optimizer=optimizer)
        resumed = load(FOLDER, **state)
        start = 0 if resumed is None else resumed.step
        for step in range(start, 9):
            optimizer.zero_grad()
            model(torch.full((1, 4), float(step + world.rank))).sum().backward()
            dies("step")
            optimizer.step()
            commit(FOLDER, step + 1, **state)
        weights = [value.tolist() for value in model.module.parameters()]
        print(json.dumps({"rank": world.rank, "start": start, "weights": weights}), flush=True)
        open(end, "a").close()
        world.barrier()

    comm = whole.Split(0 if number >= 0 else MPI.UNDEFINED, number)
    try:
        if number >= 0:
            train(comm)
        else:
            while not os.path.exists(end):
                whole.Iprobe(MPI.ANY_SOURCE, 99)  # raises when a rank has died
                time.sleep(0.02)
    except (MpidistError, MPI.Exception):
        if number >= 0:
            mpidist.comm.default().close()
        whole.Revoke()
        living = whole.Shrink()
        lost = set(range(ranks)) - set(living.allgather(number))
        number = number if number >= 0 else lost.pop()
        train(living.Split(0, number))
"""


@pytest.mark.slow
# Deaths in a step are those of tests/elastic/test_recovery.py, too.
@pytest.mark.parametrize(
    ("dead", "where"), [pytest.param(1, "step", marks=pytest.mark.long), (0, "commit")]
)
def test_a_spare_takes_the_place_of_a_dead_rank_with_the_same_bits(tmp_path, dead, where):
    def weights(name, *values):
        (tmp_path / name).mkdir()
        text = _SPARE.replace("FOLDER", repr(str(tmp_path / name)))
        for word, value in zip(("DEAD", "WHERE"), values, strict=True):
            text = text.replace(word, repr(value))
        done = run(4, text, "--with-ft", "ulfm", env={"MPIDIST_JOB": f"{tmp_path.name}-{name}"})
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert sorted(line["rank"] for line in lines) == [0, 1, 2], done.stdout + done.stderr
        assert {line["start"] for line in lines} == {0 if values[0] is None else 5}, lines
        return {line["rank"]: line["weights"] for line in lines}

    assert weights("lost", dead, where) == weights("straight", None, "never")


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group", "memory")
@pytest.mark.parametrize("call", ["commit", "load"])
def test_a_relative_folder_of_a_rank_without_a_working_folder(group, tmp_path, monkeypatch, call):
    """Each rank looks for commits by itself, so all have to know that one cannot."""
    last, model = group.rank == group.size - 1, torch.nn.Linear(2, 2)
    where = tmp_path / f"removed{group.rank}"
    where.mkdir()
    monkeypatch.chdir(where)
    if last:
        where.rmdir()
    error = FileNotFoundError if last else DisagreementError
    words = "working folder of this process was removed, and the path is relative"
    raises_on_all(
        group,
        error,
        lambda: (
            commit("run", 1, model=model, group=group)
            if call == "commit"
            else load("run", model=model, group=group)
        ),
        words if last else "",
    )
