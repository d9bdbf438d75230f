"""The environment variables of torchrun, derived from those of an MPI launcher (pure).

Frameworks read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT`` long before the first collective, so they are set without MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpidist.comm.mpi import launcher_env

# Names of the variables that an earlier process of this job has set by these rules. A child under a
# launcher of its own inherits them, and must overwrite them: they are not the user's.
SET_BY_US = "MPIDIST_SET_VARIABLES"

_RANKS_ON_NODE = {
    "mpirun (Open MPI)": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun (MVAPICH2)": "MV2_COMM_WORLD_LOCAL_SIZE",
    "aprun/mpiexec (PALS)": "PMI_LOCAL_SIZE",
    "mpiexec (Hydra)": "MPI_LOCALNRANKS",
    "mpiexec (PMI)": "PMI_LOCAL_SIZE",
}
_LOOPBACK = "127.0.0.1"
# mpidist never connects to this address. torch's checkpointing process does, to the address that
# rank 0 sends to the others. Any other connection fails with an error that names this host (RFC
# 2606 reserves .invalid).
_UNKNOWN_HOST = "rank0.mpidist.invalid"
_PORT = "29500"  # torch's own default


def torch_variables(environ: Mapping[str, str], hostname: str) -> dict[str, str]:
    """Return the variables that a rank of an MPI launcher lacks, by name.

    Args:
        environ: Usually ``os.environ``. Variables that the user has set are not in the result.
        hostname: This node's name.

    Returns:
        The variables and ``SET_BY_US``, which lists their names. Empty under torchrun, which sets
        its own, and for a process without a launcher.
    """
    launch = launcher_env.from_environment(environ)
    if (
        launch.launcher == "torchrun"
        or "TORCHELASTIC_RUN_ID" in environ
        or launch.size is None
        or launch.rank is None
    ):
        return {}
    on_node = _ranks_on_node(launch.launcher, environ)
    address = (
        _LOOPBACK
        if on_node == launch.size
        else hostname
        if launch.rank == 0
        else _first_host(launch.launcher, environ)
    )
    values = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.size,
        "LOCAL_RANK": launch.local_rank,
        "LOCAL_WORLD_SIZE": on_node,
        "MASTER_ADDR": address or _UNKNOWN_HOST,
        "MASTER_PORT": _PORT,
    }
    inherited = environ.get(SET_BY_US, "").split(",")
    wanted = {name: str(value) for name, value in values.items() if value is not None}
    lacking = {
        name: value for name, value in wanted.items() if name not in environ or name in inherited
    }
    return {**lacking, SET_BY_US: ",".join(lacking)} if lacking else {}


def disagreement(environ: Mapping[str, str], rank: int, size: int) -> str | None:
    """Return why ``RANK`` or ``WORLD_SIZE`` contradicts this job, or None."""
    announced = environ.get("WORLD_SIZE", "")
    if size == 1 and announced.isdigit() and int(announced) > 1:
        return (
            launcher_env.alone(int(announced), f"WORLD_SIZE={announced}")
            + ". Unset WORLD_SIZE where one process is meant"
        )
    for name, what, truth in (("RANK", "process as", rank), ("WORLD_SIZE", "job with", size)):
        value = environ.get(name, "")
        if value and value != str(truth):
            return (
                f"{name}={value} is set, but MPI started this {what} {name}={truth}: a framework "
                f"that reads {name} would train "
                f"as another rank than the one that communicates. Unset {name} in the job script, "
                "or start as many ranks with "
                "mpirun or srun"
            )
    return None


def started_alone(environ: Mapping[str, str]) -> str | None:
    """Return why this process must not be a world of one, or None."""
    size = launcher_env.announced_size(environ, environ.get(SET_BY_US, "").split(","))
    return disagreement({"WORLD_SIZE": str(size)}, 0, 1) if size is not None else None


def _ranks_on_node(launcher: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(_RANKS_ON_NODE.get(launcher, ""), "")
    if launcher == "srun":
        counts = _tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = environ.get("SLURM_NODEID", "")
        return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None
    return int(text) if text.isdigit() else None


def _tasks_of_nodes(text: str) -> list[int]:
    """Expand Slurm's ``2(x3),1`` to ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _first_host(launcher: str, environ: Mapping[str, str]) -> str | None:
    """Return the first host of ``node[03-07,9]-ib,other``: node03-ib, where Slurm puts rank 0."""
    found = re.match(
        r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", environ.get("SLURM_STEP_NODELIST", "")
    )
    return (
        "".join(part or "" for part in found.groups()) or None
        if launcher == "srun" and found
        else None
    )
