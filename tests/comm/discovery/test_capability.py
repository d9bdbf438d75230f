"""Capabilities on device memory: forced, cached, tried or staged, with one result for all ranks.

The CPU replaces a device here; the GPU test at the end uses a real one.
"""

import json
import sys

import pytest
import torch

from mpidist.comm.discovery import (
    capability,
    capability_trial,
    library_report,
    trial_operations,
)
from mpidist.comm.discovery.capability import (
    agreed_operations,
    capabilities,
    known_operations,
    takes_blocking_calls,
    try_operations,
)
from mpidist.comm.mpi import cuda_context
from mpidist.errors import MpidistError
from tests.tools.support import agree, raises_on_all

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("folder")
EVERYTHING = frozenset(trial_operations.OPERATIONS)
# A rank with MPI but without torch, whose import takes seconds.
_RANK = """
import sys
from mpi4py import MPI
for operation in sys.argv[sys.argv.index("--device") + 2 :]:
    if MPI.COMM_WORLD.Get_rank() == 0:
        print("mpidist-probe begins", operation, flush=True)
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.Get_rank() == 0:
        verdict = "works" if MPI.COMM_WORLD.Get_size() == 2 else "alone"
        print("mpidist-probe ended", operation, verdict, flush=True)
"""


def _raise(error):
    raise error


def forget(comm, monkeypatch):
    """Reset this module's state, as in a new job."""
    comm.device_operations.clear()
    monkeypatch.setattr(capability, "_tables", {})


# --- one rank ---


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", frozenset()), ("1", EVERYTHING), ("", frozenset()), (None, frozenset())],
)
def test_the_environment_forces_all_operations_or_none(world, monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("MPIDIST_CUDA_AWARE", value)
    assert known_operations(CPU) == expected


@pytest.mark.mpi
def test_an_invalid_value_of_the_environment_is_named(world, monkeypatch):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "yes")
    with pytest.raises(ValueError, match="MPIDIST_CUDA_AWARE must be 0 or 1, or unset; got 'yes'"):
        known_operations(CPU)


@pytest.mark.mpi
def test_a_library_without_cuda_support_is_not_tried(world, monkeypatch):
    monkeypatch.setattr(library_report, "cuda_support", lambda: (False, "it says so"))
    assert known_operations(torch.device("cuda")) == frozenset()


@pytest.mark.mpi
def test_capabilities_launch_nothing(world, monkeypatch, launches):
    monkeypatch.setattr(capability.runtime, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(library_report, "cuda_support", lambda: (True, "it says so"))
    monkeypatch.setattr(capability, "_key", lambda device, is_cuda_first: {"device": "pretended"})
    assert set(capabilities().operations.values()) == {"unknown"}
    capability._try_operations(torch.device("cuda", 0), capability._is_cuda_first())
    assert capabilities().operations["Alltoallv"] == "ended by signal 11 (SIGSEGV)"
    assert len(launches) == 1
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    assert set(capabilities().operations.values()) == {"works, says MPIDIST_CUDA_AWARE=1"}


@pytest.mark.mpi
def test_without_a_device_every_operation_says_so(world, monkeypatch):
    monkeypatch.setattr(capability.runtime, "device", lambda: CPU)
    assert set(capabilities().operations.values()) == {"this rank has no CUDA device"}


@pytest.mark.mpi
@pytest.mark.parametrize("text", ["", '{"format": 1, "key": {}, "value": {}}', None])
def test_a_cache_that_is_broken_is_written_again(world, launches, folder, monkeypatch, text):
    table = capability._try_operations(CPU, capability._is_cuda_first())
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(whole.replace('"works"', "1") if text is None else text)
    monkeypatch.setattr(capability, "_tables", {})
    assert known_operations(CPU) == frozenset()
    assert capability._try_operations(CPU, capability._is_cuda_first()) == table
    assert path.read_text() == whole


@pytest.mark.mpi
def test_results_of_another_version_of_the_trial_are_not_used(world, launches, monkeypatch):
    """An older trial may have called MPI in another way under the same name."""
    monkeypatch.setattr(capability, "VERSION", trial_operations.VERSION - 1)
    capability._try_operations(CPU, capability._is_cuda_first())
    for version, expected in (
        (trial_operations.VERSION - 1, EVERYTHING - {"Alltoallv"}),
        (trial_operations.VERSION, frozenset()),
    ):
        monkeypatch.setattr(capability, "VERSION", version)
        monkeypatch.setattr(capability, "_tables", {})
        assert known_operations(CPU) == expected


@pytest.mark.mpi
def test_a_job_that_did_not_start_is_not_kept(world, folder, monkeypatch):
    monkeypatch.setattr(
        capability_trial,
        "try_operations",
        lambda *_, **__: dict.fromkeys(trial_operations.OPERATIONS, "not tried: no mpirun"),
    )
    capability._try_operations(CPU, capability._is_cuda_first())
    assert list(folder.iterdir()) == []
    table = capability._known_table(CPU, capability._is_cuda_first())
    assert set(table.values()) == {"not tried: no mpirun"}  # but this job does not try again


@pytest.mark.mpi(min_size=2)
def test_what_was_found_with_cuda_first_is_not_for_a_job_that_started_mpi_first(
    world, launches, monkeypatch
):
    monkeypatch.setattr(cuda_context, "_is_first", True)
    capability._try_operations(CPU, True)
    assert known_operations(CPU) == EVERYTHING - {"Alltoallv"}
    for is_first in (False, None):
        monkeypatch.setattr(cuda_context, "_is_first", is_first)
        monkeypatch.setattr(capability, "_tables", {})
        assert capabilities().cuda_before_mpi is is_first
        assert known_operations(CPU) == frozenset()


@pytest.mark.mpi
def test_the_key_is_that_of_a_process_without_a_launcher(world, monkeypatch, tmp_path):
    """Open MPI's mpirun tells its ranks where the library is."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lib")
    monkeypatch.setattr(
        capability.installed, "library_file", lambda: str(tmp_path / "lib" / "libmpi.so.40")
    )
    keys = []
    for folders in ("/opt/ucx/lib", f"{tmp_path}/link:{tmp_path}/lib:/opt/ucx/lib", ""):
        monkeypatch.setenv("LD_LIBRARY_PATH", folders)
        monkeypatch.setenv("OPAL_PREFIX", folders)
        keys.append(capability._key(CPU, True))
    assert keys[0] == keys[1] != keys[2]


# --- all ranks ---


@pytest.mark.mpi
def test_what_was_tried_is_of_later_jobs_and_of_either_order(group, launches, monkeypatch, folder):
    comm = group._comm
    expected = EVERYTHING - {"Alltoallv"}
    for _ in range(2):
        try_operations(CPU)
        assert len(launches) == 2
        monkeypatch.setattr(capability, "_tables", {})
    for is_first in (True, False):
        monkeypatch.setattr(cuda_context, "_is_first", is_first)
        forget(comm, monkeypatch)
        found = [agreed_operations(comm, CPU) for _ in range(2)]
        agree(group, found == [expected] * 2 and known_operations(CPU) == expected, str(found))
    assert len(launches) == 2


@pytest.mark.mpi(min_size=2)
def test_the_order_of_the_group_is_mpi_first_where_one_rank_has_it(group, monkeypatch):
    asked = []
    table = dict.fromkeys(trial_operations.OPERATIONS, "works")
    monkeypatch.setattr(
        capability, "_known_table", lambda device, first: asked.append(first) or table
    )
    for last in (True, False):
        monkeypatch.setattr(
            cuda_context, "_is_first", last if group.rank == group.size - 1 else True
        )
        group._comm.device_operations.clear()
        agreed_operations(group._comm, CPU)
    agree(group, asked == ([True, False] if group.rank == 0 else []), f"{asked}")


@pytest.mark.mpi
@pytest.mark.parametrize("is_aware", [True, False, None])
def test_without_a_trial_all_is_staged_and_rank_0_says_so(group, launches, monkeypatch, is_aware):
    comm = group._comm
    monkeypatch.setattr(library_report, "device_support", lambda: (is_aware, "MPIX_Query"))
    if is_aware is False:
        monkeypatch.setattr(capability, "_known_table", lambda *_: dict.fromkeys(EVERYTHING, "no"))
    texts = []
    capability._warn_once.cache_clear()
    monkeypatch.setattr(capability._log, "warning", lambda text, *args: texts.append(text % args))
    found = []
    for _ in range(2):
        comm.device_operations.clear()
        found.append(agreed_operations(comm, CPU))
    alone = group.split(group.rank)
    agreed_operations(alone._comm, CPU)  # rank 0 of this group, but not of the job
    alone.close()
    agree(group, found == [frozenset()] * 2 and launches == [] and not known_operations(CPU))
    is_said = group.rank == 0 and is_aware is not False
    agree(group, len(texts) == is_said, str(texts))
    if is_said:
        assert 'staged; run "mpidist doctor" on a GPU node' in texts[0]
        assert ("says that it does (MPIX_Query)" in texts[0]) is (is_aware is True)


@pytest.mark.mpi
def test_results_that_cannot_be_kept_are_told(world, launches, monkeypatch):
    texts = []
    monkeypatch.setattr(capability._log, "warning", lambda text, *args: texts.append(text % args))
    monkeypatch.delenv("MPIDIST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(capability.cache.Path, "home", lambda: _raise(RuntimeError("no home")))
    capability._try_operations(CPU, capability._is_cuda_first())
    assert len(texts) == 1 and "MPIDIST_CACHE, or the user's cache folder" in texts[0]


@pytest.mark.mpi(min_size=2)
def test_a_table_that_one_rank_alone_has(group, launches, monkeypatch, tmp_path):
    """Caches of nodes may differ: rank 0's is that of all."""
    comm = group._comm
    for having in (0, group.size - 1):
        forget(comm, monkeypatch)
        monkeypatch.setenv("MPIDIST_CACHE", str(tmp_path / f"{having} {group.rank}"))
        if group.rank == having:
            capability._try_operations(CPU, capability._is_cuda_first())
        found = agreed_operations(comm, CPU)
        agree(group, found == (EVERYTHING - {"Alltoallv"} if having == 0 else frozenset()))


@pytest.mark.mpi
def test_a_job_beside_this_job(group, monkeypatch):
    """Under a launcher, too, the child job must neither join nor abort this job."""
    real = capability_trial.try_operations
    program = [sys.executable, "-c", _RANK]
    monkeypatch.setattr(
        capability_trial,
        "try_operations",
        lambda *args, **_: real(*args, program=program, silence_s=40),
    )
    if group.rank == 0:
        try_operations(CPU)
    operations = agreed_operations(group._comm, CPU)
    agree(group, operations == EVERYTHING, f"{capability._tables}")


@pytest.mark.mpi
def test_a_wrapper_that_never_blocks_gets_no_reductions(group, launches):
    comm = group._comm
    try_operations(CPU)
    sleeping = comm.sleeping()
    kept = agreed_operations(sleeping, CPU)
    agree(group, kept == EVERYTHING - {"Alltoallv", "Allreduce"}, f"{kept}")
    assert not takes_blocking_calls(sleeping)
    if takes_blocking_calls(comm):  # all ranks share one node
        assert agreed_operations(comm, CPU) >= trial_operations.REDUCTIONS


@pytest.mark.mpi
def test_a_collective_whose_nonblocking_form_fails_is_not_for_a_wrapper(group, monkeypatch):
    verdicts = {**dict.fromkeys(trial_operations.OPERATIONS, "works"), "Ibcast": "hung"}
    monkeypatch.setattr(capability_trial, "try_operations", lambda *_, **__: verdicts)
    try_operations(CPU)
    operations = agreed_operations(group._comm.sleeping(), CPU)
    agree(group, "Bcast" not in operations and "Allgather" in operations, f"{operations}")


@pytest.mark.mpi
def test_a_failure_of_rank_0_raises_on_all(group, monkeypatch):
    def fail(*_, **__):
        raise OSError("no processes left")

    monkeypatch.setattr(capability, "_known_table", fail)
    raises_on_all(
        group,
        MpidistError,
        lambda: agreed_operations(group._comm, CPU),
        "rank 0 could not find out",
    )


@pytest.mark.mpi(min_size=2)
def test_an_environment_that_differs_raises_on_all(group, launches, monkeypatch):
    if group.rank == group.size - 1:
        monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    message = raises_on_all(
        group,
        MpidistError,
        lambda: agreed_operations(group._comm, CPU),
        "must be the same on all ranks",
    )
    assert f"it is unset on rank 0, 1 on rank {group.size - 1}" in message
    assert launches == []


@pytest.mark.mpi
def test_an_invalid_value_of_the_environment_raises_on_all(group, monkeypatch):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "2")
    raises_on_all(group, ValueError, lambda: agreed_operations(group._comm, CPU), "got '2'")


@pytest.mark.mpi
def test_forcing_needs_no_launch(group, launches, monkeypatch):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    off = agreed_operations(group._comm, CPU)
    forget(group._comm, monkeypatch)
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    forced = agreed_operations(group._comm, CPU)
    agree(
        group,
        (off, forced, launches) == (frozenset(), EVERYTHING, []),
        f"{off}, {forced}, {launches}",
    )


# --- a real device ---


@pytest.mark.gpu
@pytest.mark.mpi(min_size=2)
def test_operations_that_work_in_the_child_job_work_in_this_job(group):
    device = capability.runtime.device()
    operations = agreed_operations(group._comm, device)
    if group.rank == 0:
        print(json.dumps(capabilities().operations, indent=1), file=sys.stderr)
    if not operations:
        pytest.skip("no operation of this MPI works on device memory")
    for operation in trial_operations.OPERATIONS:  # the same order on all ranks
        if operation in operations:
            verdict = trial_operations.attempt(group._state.mpi, operation, device)
            agree(group, verdict == trial_operations.WORKS, f"{operation}: {verdict}")
