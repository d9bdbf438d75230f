"""CUDA context of a rank: its device, its creation before MPI starts, and its threads.

The devices are pretended.
"""

from __future__ import annotations

import sys
import threading
import warnings
from functools import partial

import pytest
import torch

from mpidist.comm.memory.stream import CudaDevice
from mpidist.comm.mpi import cuda_context, launcher_env, runtime
from mpidist.comm.mpi.cuda_context import current_at_start, device_index
from mpidist.comm.mpi.launcher_env import Launch
from tests.comm.fake_cuda import FakeCuda
from tests.tools.support import started

SECOND = Launch("srun", 8, 1)


@pytest.fixture
def cuda(monkeypatch):
    made = FakeCuda()
    made.install(partial(monkeypatch.setattr, raising=False))
    monkeypatch.setattr(launcher_env, "from_environment", lambda environ: SECOND)
    monkeypatch.setattr(cuda_context, "_is_first", None)
    monkeypatch.setattr(cuda_context, "_index", None)
    monkeypatch.setattr(cuda_context, "_visible_at_start", None)
    monkeypatch.delenv("MPIDIST_CUDA_AWARE", raising=False)
    return made


@pytest.mark.parametrize(
    ("count", "held", "current", "launch", "expected"),
    [
        (4, [], 0, SECOND, 1),
        (4, [], 0, Launch("srun", 8, 5), 1),
        (4, [3], 0, SECOND, 3),  # the user's choice
        (4, [0, 2], 2, SECOND, 2),
        (1, [], 0, Launch("mpiexec (PMI)", 8, None), 0),
        (4, [], 0, Launch("mpiexec (PMI)", 8, None), None),  # else all ranks would use device 0
        (1, [], 0, Launch("python", None, None), None),
        (4, [1], 0, Launch("python", None, None), 1),
    ],
)
def test_the_device_whose_context_mpi_finds(count, held, current, launch, expected):
    assert device_index(count, held, current, launch) == expected


def test_a_context_is_made_and_current_while_mpi_starts_and_the_users_device_stays(cuda):
    with current_at_start(False):
        assert (cuda.current, cuda.contexts) == (1, [1])
    assert cuda.current == 0 and cuda_context.is_first() is True


def test_devices_that_are_hidden_too_late_are_logged(cuda, monkeypatch, caplog):
    """And raise nothing where warnings are errors: the other ranks would wait."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with current_at_start(False):
        pass
    cuda_context.warn_of_late_visibility()
    assert not caplog.records
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda_context.warn_of_late_visibility()
    assert "was None when MPI and CUDA started: it has no effect" in caplog.text


def test_mpi_without_device_memory_leaves_cuda_alone(cuda, monkeypatch):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    with current_at_start(False):
        pass
    assert cuda.log == [] and cuda_context.is_first() is None


def test_no_context_is_made_for_running_mpi(cuda):
    with current_at_start(True):
        assert cuda.contexts == []
    assert cuda_context.is_first() is False
    cuda.use(0)
    with current_at_start(True):
        assert cuda.current == 0
    assert cuda_context.is_first() is None  # the order is unknown


def test_a_device_that_refuses_does_not_keep_mpi_from_starting(cuda):
    cuda.refuses = True
    with current_at_start(False):
        assert cuda.current == 0
    assert cuda_context.is_first() is False


def test_a_forked_process_without_cuda_starts_mpi_without_a_context(cuda, monkeypatch):
    """With ``PYTORCH_NVML_BASED_CUDA_CHECK`` torch counts by NVML devices that CUDA refuses."""

    def refuse(index):
        raise RuntimeError("CUDA driver error: initialization error")

    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", refuse)
    cuda.refuses = True
    for is_running in (False, True):
        with current_at_start(is_running):
            assert cuda.current == 0
        assert cuda_context.is_first() is False


def test_no_context_is_made_if_not_asked_for(cuda):
    with current_at_start(False, makes=False):
        assert cuda.contexts == []
    assert cuda_context.is_first() is False
    cuda.use(2)
    with current_at_start(False, makes=False):
        assert cuda.current == 2
    assert cuda_context.is_first() is True


def in_thread(body):
    thread = threading.Thread(target=runtime.guard_thread(body), name="ours")
    thread.start()
    thread.join()


def test_a_guarded_thread_starts_on_the_device_of_the_thread_that_starts_it(cuda):
    seen = []
    in_thread(lambda: seen.append(cuda.current))
    assert seen == [0] and cuda.contexts == []  # no effect without CUDA
    cuda.set_device(3)
    in_thread(lambda: seen.append(cuda.current))
    assert seen == [0, 3] and "used 3 in ours" in cuda.log


def test_a_guarded_thread_makes_no_context_on_a_device_that_the_rank_does_not_use(cuda):
    with current_at_start(False):
        pass
    seen = []
    in_thread(lambda: seen.append(cuda.current))  # this thread's current device is still 0
    assert seen == [1] and cuda.contexts == [1]


def test_a_device_in_an_error_state_does_not_end_the_thread(cuda):
    cuda.set_device(3)
    cuda.refuses = True
    seen = []
    in_thread(lambda: seen.append(True))
    assert seen == [True]


def test_mpi_is_called_with_the_tensors_device_current_and_bound(cuda):
    device = CudaDevice(torch.device("cuda", 2))
    in_fresh = []

    def body():
        with device.as_current():
            in_fresh.append(cuda.current)
        in_fresh.append(cuda.current)

    thread = threading.Thread(target=body, name="a user's")
    thread.start()
    thread.join()
    assert in_fresh == [2, 0] and cuda.contexts == [2]
    assert "used 2 in a user's" in cuda.log  # CUDA was called: the driver has a context there


def test_a_query_for_capture_makes_no_context_on_the_current_device(cuda, monkeypatch):
    # torch's query is for the current device's current stream.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.use(cuda.current))
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.Stream)
    CudaDevice(torch.device("cuda", 2)).record_current_stream()
    assert cuda.contexts == [2]


_LOADS = """
import os, sys
from tests.comm.fake_cuda import FakeCuda
cuda = FakeCuda()
cuda.install()
import mpidist.comm.group
from mpidist.comm.mpi import cuda_context, launcher_env, library
assert cuda.log == [], cuda.log
cuda_context.launcher_env = type(sys)("launcher_env")
cuda_context.launcher_env.from_environment = lambda environ: launcher_env.Launch("srun", 8, 1)

def start(real=library._start):
    cuda.log.append(f"mpi starts on {cuda.current}")
    real()

library._start = start
library.MPI.COMM_WORLD, library.MPI.SUM
print(*cuda.log, cuda_context.is_first(), sep="; ")
cuda.log.clear()
if os.fork() == 0:
    try:
        library.load()
    except Exception as error:
        print(type(error).__name__, *cuda.log, flush=True)
    os._exit(0)
os.wait()
"""


def test_mpi_starts_after_cuda_and_a_forked_worker_uses_neither():
    done = started([sys.executable, "-c", _LOADS], 60)
    first, worker = done.stdout.splitlines()[:2]
    assert first == "is_available; context 1; used 1 in MainThread; mpi starts on 1; True", (
        done.stdout + done.stderr
    )
    assert worker == "MpidistError", done.stdout + done.stderr


@pytest.mark.slow
def test_mpi_started_by_other_code_warns():
    code = _LOADS.replace(
        "import mpidist.comm.group", "from mpi4py import MPI\nimport mpidist.comm.group"
    )
    done = started([sys.executable, "-c", code], 60)
    assert done.stdout.splitlines()[0] == "is_available; mpi starts on 0; False", (
        done.stdout + done.stderr
    )
