"""Environment of a measurement: versions, processor, binding, settings.

Neither host names nor paths are recorded.
"""

from __future__ import annotations

import io
import os
import platform
import re
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import mpidist
from harness import devices

# Tables contain non-ASCII signs, which some batch systems cannot write to stdout.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")

_SETTINGS = (
    "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_mpi_ft_enable",
    "GLOO_SOCKET_IFNAME", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip


def describe(comm: Any, device: torch.device | None = None) -> dict[str, Any]:
    """Describe the job.

    Collective: over ``comm``, an mpi4py communicator of all ranks.

    Args:
        device: Named in the description if it is a GPU.
    """
    from mpi4py import MPI

    vendor, numbers = MPI.get_vendor()
    on_gpu: dict[str, Any] = {}
    if device is not None and device.type == "cuda":
        # Without the multi-process service, ranks that share a GPU take turns.
        on_gpu = {
            "device": devices.describe(device),
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
        }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": comm.Get_size(),
        "nodes": _nodes(comm),
        "mpi_library": f"{vendor} {'.'.join(map(str, numbers))}",
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": version("mpi4py"),
        "mpidist": mpidist.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        # The load before the benchmark: near 0 on a quiet machine.
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "cores_of_ranks": comm.allgather(sorted(os.sched_getaffinity(0))),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        **on_gpu,
    }


def processor(record: dict[str, Any]) -> str:
    """Return the name of the processor that computed: the GPU, or the CPU."""
    return record["device"]["name"] if "device" in record else record["cpu"]


def binding(record: dict[str, Any]) -> str:
    """Describe in words on which cores the ranks may run."""
    cores = record["cores_of_ranks"]
    if any(len(own) < 2 for own in cores):
        return (
            "each rank is bound to one core, and Gloo's threads with it: start with mpirun "
            "--bind-to none to be fair to Gloo"
        )
    if all(len(own) == record["logical_cores"] for own in cores):
        return "the ranks are not bound"
    return "each rank is bound to " + " or ".join(sorted({f"{len(own)} cores" for own in cores}))


def title(record: dict[str, Any], what: str) -> str:
    """Return the title of a record's plot: what was measured, libraries, link and processor."""
    about = record["environment"]
    link = f", a link of {link_text(record['link'])}" if record.get("link") else ""
    torch_version = about["torch"].partition("+")[0]
    return f"{what}: {about['mpi_library']}{link}, torch {torch_version}, {processor(about)}"


def link_text(link: str) -> str:
    """Return a link's name, ``10gbit``, as its rate; another name as it is."""
    found = re.fullmatch(r"(\d+)(m|g)bit", link)
    return f"{found[1]} {found[2].upper()}bit/s" if found else link


def library_name(record: dict[str, Any]) -> str:
    """Return the MPI library's name for file names: ``openmpi``, ``mpich``."""
    return "".join(record["mpi_library"].split()[:-1]).lower()


def machine_identity() -> str:
    """Return an identity of the machine that is equal in separate network namespaces."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _nodes(comm: Any) -> int:
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = node.Get_rank() == 0
    node.Free()
    return sum(comm.allgather(first))


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
