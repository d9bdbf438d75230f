"""What the MPI library of this job can do, asked of the library itself."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from mpidist.comm import runtime
from mpidist.comm.library import MPI


@dataclass(frozen=True)
class Capabilities:
    """One MPI library's abilities.

    Attributes:
        library: Its name and version, first line of what it says of itself.
        standard: The MPI standard that it follows, (major, minor).
        thread_level: MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE; mpidist refuses less.
        survives_failures: ULFM is there and switched on: calls under way can be revoked, a group can shrink.
        cuda_aware: It takes device pointers; None if it does not say.
        cuda_source: Who says so.
    """

    library: str
    standard: tuple[int, int]
    thread_level: str
    survives_failures: bool
    cuda_aware: bool | None
    cuda_source: str


def capabilities() -> Capabilities:
    """Ask the MPI library.

    Collective: if MPI has not started, like ``init``.
    """
    world = runtime.world()
    cuda_aware, source = _cuda_support()
    level = "MPI_THREAD_MULTIPLE" if world.thread_level == MPI.THREAD_MULTIPLE else "MPI_THREAD_SERIALIZED"
    return Capabilities(
        library=_library(), standard=MPI.Get_version(), thread_level=level, survives_failures=_has_ulfm(),
        cuda_aware=cuda_aware, cuda_source=source,
    )  # fmt: skip


def _library() -> str:
    return " ".join(MPI.Get_library_version().split("\n")[0].replace("\0", "").split())


def _has_ulfm() -> bool:
    # Without ``mpirun --with-ft ulfm`` Open MPI has the calls, but Revoke silently does nothing.
    switch = os.environ.get("OMPI_MCA_mpi_ft_enable", "0")  # noqa: SIM112
    return "Open MPI" in _library() and switch.lower() in ("1", "true", "yes")


def _cuda_support() -> tuple[bool | None, str]:
    # The most portable answer first: MPI-4.1 §11.4.3, then the libraries' own query, then vendors' switches.
    info = runtime.world().comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds is not None and any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return True, f"mpi_memory_alloc_kinds={kinds}"
    for name in (None, os.environ.get("MPI4PY_LIBMPI"), "libmpi.so.40" if "Open MPI" in _library() else "libmpi.so.12"):
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
