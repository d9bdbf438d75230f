"""Recorder of a process: its setting, its file, and what a job's processes leave behind."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidist.comm.execution.work import Work
from mpidist.comm.mpi import job_folder
from mpidist.comm.recorder import recorder, recording
from mpidist.comm.recorder.file_format import WORKER
from mpidist.comm.recorder.recorder import Off, Settings, settings
from mpidist.comm.recorder.ring import SLOTS, Ring
from tests.tools.support import short_job


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Return the world of a process that has just joined it."""
    joined = SimpleNamespace(start="job", rank=1, size=4, key="a")
    ranks = SimpleNamespace(Get_rank=lambda: 3)
    monkeypatch.delenv(recorder.ENV_RECORDER, raising=False)
    monkeypatch.setattr(job_folder, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(job_folder, "_jobs", {})
    monkeypatch.setattr(recorder.runtime, "is_initialized", lambda: True)
    monkeypatch.setattr(recorder.runtime, "world", lambda: joined)
    monkeypatch.setattr(recorder.runtime, "processes_of_job", lambda: ranks)
    monkeypatch.setattr(recorder, "_recorder", None)
    monkeypatch.setattr(recorder, "_world", None)
    (tmp_path / "memory").mkdir()
    yield joined
    for job in job_folder._jobs.values():
        job.close(0)


def test_the_variables_words():
    assert settings({}) == settings({"MPIDIST_RECORDER": " "}) == Settings(SLOTS, None)
    assert settings({"MPIDIST_RECORDER": "0"}).slots == 0
    assert settings({"MPIDIST_RECORDER": "100"}) == Settings(100)
    assert settings({"MPIDIST_RECORDER": "/a/b"}) == Settings(SLOTS, Path("/a/b"))
    assert settings({"MPIDIST_RECORDER": "here"}).folder == Path.cwd() / "here"
    for text in ("1", "99999999"):
        with pytest.raises(ValueError, match=f"MPIDIST_RECORDER needs a number .* got {text}"):
            settings({"MPIDIST_RECORDER": text})


def test_the_file_is_in_the_jobs_folder_and_follows_the_process_to_its_next_world(world, tmp_path):
    made = recorder.of_process()
    assert made.path == tmp_path / "memory" / f"mpidist-{os.geteuid()}-job" / "recorder-3"
    assert recorder.of_process() is made
    next_world = SimpleNamespace(start="job", rank=0, size=3, key="b")
    recorder.runtime.world = lambda: next_world
    assert recorder.of_process() is made
    (read,) = recording.recordings("job")
    assert (read.rank, read.size, read.job, read.worlds) == (0, 3, "job", ("a", "b"))
    made.close()


def test_before_the_world_entries_are_in_the_processs_memory(world, monkeypatch):
    monkeypatch.setattr(recorder.runtime, "is_initialized", lambda: False)
    first = recorder.of_process()
    assert isinstance(first, Ring) and first.path is None and recorder.of_process() is first
    monkeypatch.setattr(recorder.runtime, "is_initialized", lambda: True)
    assert recorder.of_process().path is not None
    recorder.of_process().close()


def test_a_folder_of_the_user_keeps_the_last_jobs_file(world, monkeypatch, tmp_path):
    monkeypatch.setenv("MPIDIST_RECORDER", str(tmp_path / "a" / "b"))
    for _ in range(2):
        monkeypatch.setattr(recorder, "_recorder", None)
        monkeypatch.setattr(recorder, "_world", None)
        recorder.of_process().close()
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert names == ["recorder-3", "recorder-3.before"]
    assert [one.rank for one in recording.recordings(str(tmp_path / "a" / "b"))] == [1]


def test_a_folder_that_cannot_be_written_is_one_warning(world, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPIDIST_RECORDER", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(logging.getLogger("mpidist"), "propagate", True)
    made = recorder.of_process()
    made.end(made.begin(made.signature("step", "SGD")))
    assert made.path is None and recorder.of_process() is made
    (record,) = caplog.records
    assert "rank 1: the recorder has no file" in record.getMessage()


def test_a_recorder_that_is_off_records_nothing(world, monkeypatch, tmp_path):
    monkeypatch.setenv("MPIDIST_RECORDER", "0")
    made = recorder.of_process()
    assert isinstance(made, Off) and made.group("world", "world1", (0, 1)) == "world"
    made.end(made.begin(made.signature("step", "SGD")))
    made.fail(made.begin(0))
    made.move("b", 0, 1)
    assert not list((tmp_path / "memory").iterdir())


def test_a_block_is_recorded_with_its_error(world):
    with recorder.recorded("commit", "checkpoint.commit"):
        pass
    with pytest.raises(ValueError, match="words"), recorder.recorded("backward", "b", 7):
        raise ValueError("words")
    first, second = recording.read(recorder.of_process().path).entries
    assert (first.kind, first.operation, first.failed) == ("commit", "checkpoint.commit", False)
    assert (second.kind, second.tag, second.failed) == ("backward", 7, True)
    recorder.of_process().close()


_EVERY_KIND = """
import os, signal, torch, mpidist.comm, mpidist.rpc as rpc
from mpidist import autograd, checkpoint
from mpidist.optim import DistributedOptimizer
from mpidist.zero.optimizer import OSS
world = mpidist.comm.init()
me, other = world.rank, 1 - world.rank
value = torch.ones(4)
world.all_reduce(value)
world.all_gather([torch.zeros(3), torch.zeros(3)], torch.ones(3))
world.barrier()
if me == 0:
    world.send(torch.ones(5, dtype=torch.int64), 1, tag=7)
    world.isend(torch.ones(2), 1).wait()
    world.send_object({"a": 1}, 1)
else:
    world.recv(torch.zeros(5, dtype=torch.int64), 0, tag=7)
    world.irecv(torch.zeros(2)).wait()
    world.recv_object(0)
rpc.init_rpc(f"w{me}")
assert rpc.rpc_sync(f"w{other}", max, (1, 2)) == 2
try:
    rpc.rpc_sync(f"w{other}", int, ("no number",))
except ValueError:
    pass
weight = rpc.remote(f"w{other}", torch.nn.Parameter, (torch.ones(2),))
with autograd.context() as context:
    autograd.backward(context, [weight.to_here().sum()])
    DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1).step(context)
rpc.shutdown()
model = torch.nn.Linear(2, 2)
sharded = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
model(torch.ones(2)).sum().backward()
sharded.step()
checkpoint.commit(os.environ["RUN"], 1, model=model, optimizer=sharded)
world.barrier()
if me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
world.all_reduce(torch.ones(8, dtype=torch.float64))
"""


def test_a_wait_for_another_thread_is_recorded(world):
    work = Work("all_reduce", (), "here")

    def complete():
        while not recording.recordings("job"):  # the wait has not begun
            time.sleep(1e-3)
        work.end((), None)

    thread = threading.Thread(target=complete)
    thread.start()
    work.wait()
    work.wait()  # has ended
    thread.join()
    (read,) = recording.recordings("job")
    (entry,) = read.entries
    assert (entry.kind, entry.operation) == (recording.Kind.WAIT, "wait for all_reduce")
    assert entry.end_ns > entry.begin_ns
    recorder.of_process().close()


@pytest.mark.slow
def test_every_kind_is_recorded_and_outlives_a_killed_rank(tmp_path):
    folder = tmp_path / "recordings"
    done = short_job(
        2,
        _EVERY_KIND,
        env={
            "MPIDIST_RECORDER": str(folder),
            "MPIDIST_JOB": tmp_path.name,
            "RUN": str(tmp_path / "run"),
        },
    )
    assert done.returncode, done.stdout
    recordings = recording.recordings(str(folder))
    assert [(one.rank, one.size, one.is_alive) for one in recordings] == [
        (0, 2, False), (1, 2, False),
    ], done.stderr  # fmt: skip
    for own in recordings:
        label = "world"
        other, found = 1 - own.rank, own.entries
        assert own.groups[label] == (0, 1) and own.overwritten == 0
        assert own.keys[label] == recordings[0].keys[label]
        assert (own.keys[f"w{own.rank}"], own.groups[f"w{own.rank}"]) == (WORKER, (own.rank,))

        def only(operation, kind, found=found):
            chosen = [one for one in found if one.operation == operation and one.kind == kind]
            assert chosen, (operation, [one.operation for one in found])
            return chosen[0]

        first = only("all_reduce", "collective")
        assert (first.sequence, first.dtype, first.shape, first.size_bytes, first.group) == (
            1, "float32", (4,), 16, label,
        )  # fmt: skip
        gathered = only("all_gather", "collective")
        assert (gathered.sequence, gathered.shape, gathered.size_bytes) == (2, (3,), 24)
        assert (only("barrier", "collective").sequence, gathered.peer) == (3, -1)
        if own.rank == 0:
            sent = only("send", "send")
            assert (sent.peer, sent.tag, sent.dtype, sent.shape) == (1, 7, "int64", (5,))
            assert only("isend", "send").end_ns and only("send_object", "send").peer == 1
        else:
            sent = only("recv", "receive")
            assert (sent.peer, sent.tag, sent.size_bytes) == (0, 7, 40)
            assert only("irecv", "receive").peer == 0 and only("recv_object", "receive").end_ns
        call, handler = only("max", "call"), only("max", "handler")
        assert (call.peer, handler.peer, call.group) == (other, other, "")
        theirs = [one for one in recordings[other].entries if one.operation == "max"]
        assert {one.tag for one in theirs if one.kind == "handler"} == {call.tag}
        assert only("int", "call").failed and only("int", "handler").failed
        backward = only("backward", "backward")
        parts = {one.tag for one in found if one.operation == "part of a backward pass"}
        assert backward.tag in parts and len(parts) == 2
        assert only("OSS(SGD)", "step").end_ns and only("DistributedOptimizer", "step").end_ns
        assert only("checkpoint.commit", "commit").end_ns
        assert all(one.end_ns for one in found[:-1])
    survivor, killed = recordings
    last = survivor.entries[-1]
    assert (last.operation, last.dtype, last.shape) == ("all_reduce", "float64", (8,))
    assert last.end_ns is None
    assert killed.entries[-1].operation == "barrier" and killed.entries[-1].end_ns
    for left in job_folder.MEMORY.glob(f"mpidist-*-{tmp_path.name}"):
        assert not list(left.glob("recorder-*"))
