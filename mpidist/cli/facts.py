"""Facts about one rank and its node without MPI: versions, settings, cores, memory, devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.cli.mpi_facts import MpiFacts
from mpidist.comm.discovery.library_report import driver_version
from mpidist.comm.mpi import launcher_env

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = "/dev/shm"
_CUPY = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
_SETTINGS = (
    "MPIDIST_",
    "OMPI_MCA_",
    "UCX_",
    "FI_",
    "MPIR_CVAR_",
    "MPICH_",
    "I_MPI_",
    "MV2_",
    "PSM3_",
    "OMP_",
    "MKL_NUM_",
    "MPI4PY_",
    "PYTORCH_",
    "CUDA_VISIBLE_DEVICES",
    "IBV_FORK_SAFE",
    "RDMAV_FORK_SAFE",
)
# Users set these variables, although their prefixes are a launcher's.
_USERS_OWN = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_MCA_mpi_yield_when_idle",
    "OMPI_MCA_mpi_ft_enable",
    "SLURM_MPI_TYPE",
)


@dataclass(frozen=True)
class Device:
    """One rank's CUDA device.

    Attributes:
        index: Index within this process.
        name: Model name.
        uuid: Identifier that all processes of the node share.
        visible: UUIDs of all devices that this process sees.
    """

    index: int
    name: str
    uuid: str
    visible: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """One rank and its node.

    Attributes:
        rank: Rank in the job; 0 without a launcher.
        host: Name of the node.
        launcher: Name of the launcher's command.
        tasks: Number of tasks that the launcher started; None if unknown.
        is_root: The user is root.
        versions: Versions of Python and packages, by name; "" for a missing package.
        settings: Environment variables that affect communication, by name.
        in_allocation: The environment is that of a batch job.
        cores: Number of cores of the node.
        bound_to: Cores that this process may run on.
        torch_threads: Number of torch's threads.
        shm_bytes: Size of ``/dev/shm``; -1 without one.
        shm_free_bytes: Free bytes there.
        memlock_bytes: Limit of locked memory; -1 for no limit.
        has_nvidia_driver: The kernel driver is loaded.
        driver_cuda: Newest CUDA version of the driver, as 1000 × major + 10 × minor; 0 without one.
        device: This rank's CUDA device, or None.
        path_mpirun: Path of the first mpirun on the PATH; "" without one.
        mpi: Facts that need MPI, or None if MPI did not start.
        problem: Error of MPI's start; "" without one.
        checks: Error of each small operation, by name; "" for success.
        clock_s: Clock after a barrier of all ranks, in seconds since 1970; 0 if there was none.
        computing_s: Time of a matrix product on this rank's cores, in seconds; 0 if none was made.
        has_home: ``HOME`` is set.
    """

    rank: int
    host: str
    launcher: str
    tasks: int | None
    is_root: bool
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    in_allocation: bool
    cores: int
    bound_to: tuple[int, ...]
    torch_threads: int
    shm_bytes: int
    shm_free_bytes: int
    memlock_bytes: int
    has_nvidia_driver: bool
    driver_cuda: int
    device: Device | None = None
    path_mpirun: str = ""
    mpi: MpiFacts | None = None
    problem: str = ""
    checks: Mapping[str, str] = field(default_factory=dict)
    clock_s: float = 0.0
    computing_s: float = 0.0
    has_home: bool = True


def collect(environ: Mapping[str, str], path_mpirun: str = "") -> Facts:
    """Collect this process's facts, except those of MPI and of the device.

    Must be called before MPI starts, because mpidist then sets some of the variables.
    """
    import torch

    launch = launcher_env.from_environment(environ)
    shm_bytes, shm_free_bytes = _size_of(SHARED_MEMORY)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        rank=launch.rank or 0,
        host=socket.gethostname(),
        launcher=launch.launcher,
        tasks=launch.size,
        is_root=os.geteuid() == 0,
        versions=versions(),
        settings=settings(environ),
        in_allocation=any(
            name in environ for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
        ),
        cores=os.cpu_count() or 1,
        bound_to=tuple(sorted(os.sched_getaffinity(0))),
        torch_threads=torch.get_num_threads(),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        memlock_bytes=-1 if memlock == resource.RLIM_INFINITY else memlock,
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists()
        or Path("/dev/nvidiactl").exists(),
        driver_cuda=driver_version(),
        path_mpirun=path_mpirun,
        has_home=bool(environ.get("HOME")),
    )


def with_device(facts: Facts, device: torch.device) -> Facts:
    """Return the facts with this rank's ``torch.device`` added, if it is a CUDA device."""
    import torch

    if device.type != "cuda":
        return facts
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    uuids = tuple(str(getattr(one, "uuid", index)) for index, one in enumerate(found))
    return replace(
        facts, device=Device(device.index, found[device.index].name, uuids[device.index], uuids)
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages, by name; "" for a missing package."""
    import torch

    return {
        "python": platform.python_version(),
        "mpidist": _version("mpidist"),
        "mpi4py": _version("mpi4py"),
        # torch's version is an instance of a subclass of str.
        "torch": str(torch.__version__),
        "torch's CUDA": torch.version.cuda or "",
        "cupy": next((f"{name} {found}" for name in _CUPY if (found := _version(name))), ""),
        "numpy": _version("numpy"),
    }


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment variables that affect communication or computation."""
    kept = launcher_env.without_launcher(environ)
    return {
        name: text
        for name, text in sorted(environ.items())
        if name in _USERS_OWN or (name in kept and name.startswith(_SETTINGS))
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _size_of(folder: str) -> tuple[int, int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1, -1
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
