"""Report of the running MPI library: thread level, ULFM and CUDA support; nothing is tried."""

from __future__ import annotations

import ctypes
import functools
import os

from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.library import MPI, library_name


def thread_level() -> str:
    """Return MPI_THREAD_MULTIPLE or MPI_THREAD_SERIALIZED; mpidist refuses less."""
    return (
        "MPI_THREAD_MULTIPLE"
        if runtime.world().thread_level == MPI.THREAD_MULTIPLE
        else "MPI_THREAD_SERIALIZED"
    )


@functools.cache
def cuda_support() -> tuple[bool | None, str]:
    """Return whether the library takes device pointers, None if unknown, and the source of this.

    The most portable source first: MPI-4.1 §11.4.3, the libraries' query, the vendors' switches.
    """
    info = runtime.world().comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds is not None and any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return True, f"mpi_memory_alloc_kinds={kinds}"
    for name in (
        None,
        os.environ.get("MPI4PY_LIBMPI"),
        "libmpi.so.40" if "Open MPI" in library_name() else "libmpi.so.12",
    ):
        if name == "":
            continue
        try:
            query = ctypes.CDLL(name).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype = ctypes.c_int
        return bool(query()), "MPIX_Query_cuda_support"
    if kinds is not None:
        return False, f"mpi_memory_alloc_kinds={kinds}"
    for name in ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA"):
        if os.environ.get(name) == "1":
            return True, f"{name}=1"
    return None, "the library does not say"


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, as 1000 × major + 10 × minor.

    0 without a driver.
    """
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value
