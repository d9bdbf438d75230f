"""Report of the running MPI library: ULFM and device memory; nothing is tried."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Sequence

import torch

from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.library import is_open_mpi


def device_support() -> tuple[bool | None, str]:
    """Return the report for the devices that this torch is built for: AMD's or Nvidia's."""
    return rocm_support() if torch.version.hip else cuda_support()


@functools.cache
def cuda_support() -> tuple[bool | None, str]:
    """Return whether the library takes CUDA's device pointers, None if unknown, and the source.

    The most portable source first: MPI-4.1 §11.4.3, the libraries' query, the vendors' switches.
    """
    return _support("cuda", ("MPIX_Query_cuda_support",), "MV2_USE_CUDA")


@functools.cache
def rocm_support() -> tuple[bool | None, str]:
    """Return whether the library takes ROCm's device pointers; see ``cuda_support``."""
    # Open MPI's name, and MPICH's.
    queries = ("MPIX_Query_rocm_support", "MPIX_Query_hip_support")
    return _support("rocm", queries, "MV2_USE_ROCM")


def _support(kind: str, queries: Sequence[str], switch: str) -> tuple[bool | None, str]:
    kinds = _alloc_kinds()
    if kinds is not None and any(one.split(":")[0] == kind for one in kinds.split(",")):
        return True, f"mpi_memory_alloc_kinds={kinds}"
    for file, query in itertools.product(_files(), queries):
        try:
            function = getattr(ctypes.CDLL(file), query)
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_int
        return bool(function()), query
    if kinds is not None:
        return False, f"mpi_memory_alloc_kinds={kinds}"
    for name in ("MPICH_GPU_SUPPORT_ENABLED", switch):
        if os.environ.get(name) == "1":
            return True, f"{name}=1"
    return None, "the library does not say"


def _alloc_kinds() -> str | None:
    info = runtime.world().comm.Get_info()
    kinds: str | None = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    return kinds


def _files() -> list[str | None]:
    """Return where the library may be found; None is this process."""
    usual = "libmpi.so.40" if is_open_mpi() else "libmpi.so.12"
    return [file for file in (None, os.environ.get("MPI4PY_LIBMPI"), usual) if file != ""]


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
