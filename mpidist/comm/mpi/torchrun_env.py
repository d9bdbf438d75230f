"""The environment variables that torchrun sets and frameworks read, from those of an MPI launcher; pure.

Frameworks read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT`` long before the first collective, so these are set without MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpidist.comm.mpi import launcher_env

# Names of the variables that an earlier process of this job has set by these rules. A child under a
# launcher of its own inherits them, and must not take them for the user's.
SET_BY_US = "MPIDIST_SET_VARIABLES"

_RANKS_ON_NODE = {
    "mpirun (Open MPI)": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun (MVAPICH2)": "MV2_COMM_WORLD_LOCAL_SIZE",
    "aprun/mpiexec (PALS)": "PMI_LOCAL_SIZE",
    "mpiexec (Hydra)": "MPI_LOCALNRANKS",
    "mpiexec (PMI)": "PMI_LOCAL_SIZE",
}
_LOOPBACK = "127.0.0.1"
# Nothing of ours connects to it. torch's checkpointing process does, to the address that rank 0 has
# and tells the others. Whatever else tries sees by its error that there is no such host (RFC 2606
# reserves .invalid).
_UNKNOWN_HOST = "rank0.mpidist.invalid"
_PORT = "29500"  # torch's own default


def torch_variables(environ: Mapping[str, str], hostname: str) -> dict[str, str]:
    """Return the variables that a rank of an MPI launcher lacks, by name.

    Args:
        environ: Usually ``os.environ``. What the user has set there is not among the result.
        hostname: This node's.

    Returns:
        Also ``SET_BY_US``, which names the others. Empty under torchrun, which sets its own, and
        for a plain process.
    """
    told = launcher_env.from_environment(environ)
    if (
        told.launcher == "torchrun"
        or "TORCHELASTIC_RUN_ID" in environ
        or told.size is None
        or told.rank is None
    ):
        return {}
    on_node = _ranks_on_node(told.launcher, environ)
    address = (
        _LOOPBACK
        if on_node == told.size
        else hostname
        if told.rank == 0
        else _first_host(told.launcher, environ)
    )
    values = {
        "RANK": told.rank,
        "WORLD_SIZE": told.size,
        "LOCAL_RANK": told.local_rank,
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
    """Return why ``RANK`` or ``WORLD_SIZE`` cannot be of this job, or None if they can."""
    for name, truth in (("RANK", rank), ("WORLD_SIZE", size)):
        given = environ.get(name, "")
        if given and given != str(truth):
            return (
                f"{name}={given} is set, but MPI started this job with {name}={truth}: a framework "
                f"that reads {name} would train "
                f"as another rank than the one that communicates. Unset {name} in the job script, "
                "or start as many ranks with "
                "mpirun or srun"
            )
    return None


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
