"""Reports of MPI libraries on device memory: libraries with a query, without one, and the job's."""

import subprocess

import pytest
import torch

from mpidist.comm.discovery import capability, library_report
from mpidist.comm.mpi.library import library_name
from tests.tools.support import require_tool

pytestmark = pytest.mark.mpi
OPEN_MPI, MPICH = "MPIX_Query_rocm_support", "MPIX_Query_hip_support"
UNKNOWN = (None, "the library does not say")


@pytest.fixture
def library(world, tmp_path, monkeypatch):
    """Return a function that puts a library with queries, by name, in the place of the job's."""

    def put(answers):
        file = tmp_path / f"lib{len(list(tmp_path.iterdir()))}.so"
        text = "".join(f"int {name}(void) {{ return {answers[name]}; }}\n" for name in answers)
        command = [require_tool("gcc"), "-shared", "-fPIC", "-x", "c", "-o", str(file), "-"]
        subprocess.run(command, input=text, text=True, check=True, timeout=60)
        monkeypatch.setattr(library_report, "_alloc_kinds", lambda: None)
        monkeypatch.setattr(library_report, "_files", lambda: [str(tmp_path / "none"), str(file)])
        library_report.rocm_support.cache_clear()
        library_report.cuda_support.cache_clear()

    for name in ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_ROCM", "MV2_USE_CUDA"):
        monkeypatch.delenv(name, raising=False)
    yield put
    library_report.rocm_support.cache_clear()
    library_report.cuda_support.cache_clear()


def test_the_query_of_either_library_is_asked(library):
    for name in (OPEN_MPI, MPICH):
        for answer in (1, 0):
            library({name: answer, "MPIX_Query_cuda_support": 1 - answer})
            assert library_report.rocm_support() == (bool(answer), name)
            assert library_report.cuda_support() == (not answer, "MPIX_Query_cuda_support")


def test_a_library_without_the_query_leaves_it_to_the_switches(library, monkeypatch):
    library({"MPIX_Query_cuda_support": 1})
    assert library_report.rocm_support() == UNKNOWN
    for name in ("MV2_USE_ROCM", "MPICH_GPU_SUPPORT_ENABLED"):
        monkeypatch.setenv(name, "1")
        library_report.rocm_support.cache_clear()
        assert library_report.rocm_support() == (True, f"{name}=1")


def test_the_kinds_of_the_standard_come_first(library, monkeypatch):
    library({OPEN_MPI: 0})
    for kinds, found in (
        ("mpi,system,rocm:device", (True, "mpi_memory_alloc_kinds=mpi,system,rocm:device")),
        ("mpi,system,cuda", (False, OPEN_MPI)),
    ):
        monkeypatch.setattr(library_report, "_alloc_kinds", lambda kinds=kinds: kinds)
        library_report.rocm_support.cache_clear()
        assert library_report.rocm_support() == found


def test_a_torch_for_amds_devices_goes_by_rocm(library, monkeypatch):
    monkeypatch.delenv("MPIDIST_CUDA_AWARE", raising=False)
    library({OPEN_MPI: 0, "MPIX_Query_cuda_support": 1})
    assert library_report.device_support() == (True, "MPIX_Query_cuda_support")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert library_report.device_support() == (False, OPEN_MPI)
    assert capability.known_operations(torch.device("cuda")) == frozenset()
    monkeypatch.setattr(capability.runtime, "device", lambda: torch.device("cuda", 0))
    found = capability.capabilities()
    assert (found.rocm_aware, found.rocm_source) == (False, OPEN_MPI)
    assert set(found.operations.values()) == {f"the library is not ROCm-aware ({OPEN_MPI})"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks it of the wheels")
def test_this_jobs_library_says_that_it_takes_none(world):
    """Both wheels that the tests run on were built without ROCm, and say so."""
    library_report.rocm_support.cache_clear()
    query = {"Open MPI": OPEN_MPI, "MPICH": MPICH}
    found = next((query[name] for name in query if library_name().startswith(name)), None)
    if found is None:
        pytest.skip(f"a library that is neither: {library_name()}")
    is_aware, source = library_report.rocm_support()
    assert (is_aware, source) == (False, found)
