"""Recordings: files of other processes, damaged ones, and those of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mpidist.comm.mpi import job_folder
from mpidist.comm.recorder import file_format, recording
from mpidist.comm.recorder.ring import Ring
from mpidist.errors import RecordingError

WRITES = """
import sys
from pathlib import Path
from mpidist.comm.recorder.ring import Ring
ring = Ring(Path(sys.argv[1]), "writer", 1, 2, slots=64)
signature = ring.signature("collective", "all_reduce", "", "float32", (4,))
print("begun", flush=True)
sequence = 0
while True:
    sequence += 1
    # What a torn entry would not have: all numbers of one entry are the same.
    ring.end(ring.begin(signature, sequence, sequence, sequence % 1000, sequence))
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder, "MEMORY", tmp_path)
    return tmp_path


def recorded(path, *args):
    path.parent.mkdir(exist_ok=True)
    ring = Ring(path, *args, slots=4)
    ring.end(ring.begin(ring.signature("step", "SGD")))
    ring.close()
    return path


def test_a_process_is_read_while_it_writes_and_after_it_was_killed(tmp_path):
    path = tmp_path / "recorder-1"
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"begun\n"
        try:
            # On a busy machine the writer may not run for a while.
            while len(recording.read(path).entries) < 63:
                time.sleep(1e-3)
            for _ in range(40):
                read = recording.read(path)
                numbers = [entry.number for entry in read.entries]
                assert numbers == sorted(set(numbers))
                for entry in read.entries:
                    assert entry.sequence == entry.size_bytes == entry.tag == entry.number
                    assert entry.peer == entry.number % 1000
                    assert entry.end_ns is None or 0 <= entry.end_ns - entry.begin_ns < 10**10
            assert read.is_alive and (read.rank, read.size, read.job) == (1, 2, "writer")
            assert read.pid == process.pid and "recorder-1" in read.program
            assert not replace(read, host="elsewhere").is_alive
            assert not replace(read, started_ticks=read.started_ticks + 1).is_alive
        finally:
            process.send_signal(signal.SIGKILL)
    last = recording.read(path)
    assert not last.is_alive and len(last.entries) in (63, 64)
    assert last.entries[-1].number >= read.entries[-1].number
    assert last.overwritten == last.entries[-1].number - len(last.entries)
    assert abs(last.started_wall_ns - time.time_ns()) < 600e9


def test_damaged_files_are_refused_with_a_sentence(tmp_path):
    path = recorded(tmp_path / "recorder-0")
    whole = path.read_bytes()

    def refusal(data):
        path.write_bytes(data)
        with pytest.raises(RecordingError, match=r"recorder-0 is ") as caught:
            recording.read(path)
        return str(caught.value)

    assert "no recording" in refusal(b"") and "no recording" in refusal(b"x" * 9000)
    assert "cut: 8192 bytes of" in refusal(whole[:8192])
    assert "of version 9; this mpidist reads version 1" in refusal(
        whole[:8] + (9).to_bytes(4, "little") + whole[12:]
    )
    assert "impossible sizes" in refusal(whole[:12] + b"\xff" * 12 + whole[24:])
    table = whole.index(b'["signature"')
    assert "damaged" in refusal(whole[:table] + b"\xff" + whole[table + 1 :])
    begin = file_format.HEADER_BYTES + file_format.SLOT_BYTES
    unknown = file_format.SLOT.pack(1, 2, 3, 4, 5, 6, 999, 8, 1)
    assert "damaged" in refusal(whole[:begin] + unknown + whole[begin + 64 :])


def test_the_first_end_of_a_process_is_read_with_its_place(tmp_path):
    ring = Ring(tmp_path / "recorder-0", slots=4)
    assert recording.read(ring.path).ended is None

    def fails():
        raise ValueError("two\nlines")

    try:
        fails()
    except ValueError as error:
        ring.ended(str(error), error)
    ring.ended("the job ends, too")
    end = recording.read(ring.path).ended
    assert (end.type_name, end.text) == ("ValueError", "two lines")
    assert [name for _, _, name in end.frames] == [
        "fails",
        "test_the_first_end_of_a_process_is_read_with_its_place",
    ]
    assert {file for file, _, _ in end.frames} == {__file__}


def test_the_end_of_a_process_by_mpidist_has_a_reason_alone(tmp_path):
    ring = Ring(tmp_path / "recorder-0", slots=4)
    ring.ended("x" * 5000)
    end = recording.read(ring.path).ended
    assert end == ("", "x" * 1000, ())


def test_a_deep_stack_is_read_from_its_innermost_frame_on(tmp_path):
    ring = Ring(tmp_path / "recorder-0", slots=4)
    with pytest.raises(RecursionError) as caught:
        deeper()
    ring.ended(str(caught.value), caught.value)
    frames = recording.read(ring.path).ended.frames
    assert len(frames) == 64 and {name for _, _, name in frames} == {"deeper"}


def deeper():
    deeper()


def test_the_recordings_of_a_job_are_those_of_its_folder(memory):
    own = memory / f"mpidist-{os.geteuid()}-first"
    recorded(own / "recorder-1", "first", 1, 2)
    recorded(own / "recorder-0", "first", 0, 2)
    (own / "recorder-2").write_bytes(b"none")
    (own / "recorder-0.old").write_bytes(b"none")
    (memory / f"mpidist-{os.geteuid()}-commits").mkdir()
    recorded(memory / f"mpidist-{os.geteuid()}-last" / "recorder-0", "last", 0, 1)
    assert [one.rank for one in recording.recordings("first")] == [0, 1]
    assert [one.job for one in recording.recordings()] == ["last"]
    assert [one.rank for one in recording.recordings(str(own))] == [0, 1]
    assert recording.recordings("none") == []
