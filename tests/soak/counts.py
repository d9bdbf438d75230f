"""Counts of what a process holds: threads, descriptors, MPI's objects, memory, objects of ours."""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mpidist.comm.mpi import closed_communicators, job_folder
from mpidist.comm.mpi.job_folder import path_of
from mpidist.comm.mpi.launcher_env import job_name, start_name
from mpidist.comm.mpi.library import MPI

MEMORY = "KiB of memory"
ALLOCATED = "KiB allocated by malloc"
NODE_MEMORY = "KiB of node memory"
CLOSED = "communicators to be freed"
OF_CLASS = "objects of "
# By the names of MPI's conversions from Fortran's handles, which are indices of a table.
_MPI = {
    "Comm": "communicators",
    "Group": "MPI groups",
    "Type": "datatypes",
    "Op": "operations",
    "Win": "windows",
    "Info": "infos",
    "Errhandler": "error handlers",
}
_EMPTY = 64  # indices without an object, behind which no other is expected
_RESIDENT = {"RssAnon:": MEMORY, "RssShmem:": NODE_MEMORY}


class _MallInfo(ctypes.Structure):
    """The C library's struct mallinfo2, over all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


class Counts:
    """Counts of this process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._tables = _tables()
        # The beginning of the names of what MPI has in the node's memory for this job.
        mapped = {Path(path).name.rpartition(".")[0] for path in _mapped() if "shm/sm_seg" in path}
        self._prefixes = tuple(mapped)

    def __call__(self) -> dict[str, int]:
        """Return the counts by name, after a collection of garbage."""
        gc.collect()
        found = {
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings of node memory": sum(1 for _ in _mapped()),
            "entries of /dev/shm": self._entries(),
            **self._memory(),
            **self._of_mpi(),
        }
        classes = Counter(map(type, gc.get_objects()))
        for one, count in classes.items():
            module = str(one.__module__)
            if module.partition(".")[0] == "mpidist":
                found[f"{OF_CLASS}{module}.{one.__qualname__}"] = count
        return found

    def _of_mpi(self) -> dict[str, int]:
        found = {}
        for name, table in self._tables.items():
            index = last = 0
            while index <= last + _EMPTY:
                if table(index):
                    found[name] = found.get(name, 0) + 1
                    last = index
                index += 1
        closed = sum(1 + len(one._children) for one in list(closed_communicators._closed._closed))
        if "communicators" in found:
            found["communicators"] -= closed
        found[CLOSED] = closed
        found["lost communicators"] = len(closed_communicators._closed._lost)
        return found

    def _entries(self) -> int:
        names = {naming(os.environ, "") for naming in (job_name, start_name)}
        of_mpi = [name for name in os.listdir(job_folder.MEMORY) if name.startswith(self._prefixes)]
        return len(of_mpi) + sum(1 for job in names for _ in path_of(job).rglob("*"))

    def _memory(self) -> dict[str, int]:
        # What is free goes back, or the count is that of the largest tensors so far.
        self._libc.malloc_trim(0)
        lines = Path("/proc/self/status").read_text().splitlines()
        rows = [line.split() for line in lines if line.startswith(tuple(_RESIDENT))]
        found = {_RESIDENT[name]: int(size) for name, size, _ in rows}
        # Without what malloc keeps between its blocks, for which it has asked and not given back.
        if hasattr(self._libc, "mallinfo2"):
            self._libc.mallinfo2.restype = _MallInfo
            info = self._libc.mallinfo2()
            found[ALLOCATED] = (info.uordblks + info.hblkhd) >> 10
        return found


def _mapped() -> Iterator[str]:
    """Return the files in the node's memory that this process maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(("/dev/shm/", "/memfd:")):
            yield words[5]


def _tables() -> dict[str, ctypes._CFuncPtr]:
    """Return MPI's functions from an index to a handle, by what they count; Open MPI's alone."""
    if not MPI.Get_library_version().startswith("Open MPI"):
        return {}
    lines = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in lines if "/libmpi.so" in line))
    found = {}
    for name, plural in _MPI.items():
        function = getattr(library, f"MPI_{name}_f2c")
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_int]
        found[plural] = function
    return found
