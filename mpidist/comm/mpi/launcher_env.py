"""Parser of the launcher's environment variables (mpirun, srun, PMI), and their removal for a job inside the job.

Pure, so that it is known before MPI starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The launcher's word about this process; ``None`` where it said nothing."""

    launcher: str  # name a user would type: mpirun, srun, torchrun, …
    size: int | None  # tasks the launcher started in this job step
    local_rank: int | None  # index of this task on its node
    rank: int | None = None  # index of this task among all


# (launcher, a variable that only its tasks have, tasks, local rank, rank); the first that matches
# wins. Slurm stands behind the MPI launchers because mpirun inside an allocation hands the batch
# shell's SLURM_* on to every rank.
_LAUNCHERS = (
    (
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_RANK",
    ),
    (
        "mpirun (MVAPICH2)",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_RANK",
    ),
    ("aprun/mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_RANKID"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_RANK"),
    ("mpiexec (Hydra)", "MPI_LOCALNRANKS", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_RANK"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_RANK", "RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_PROCID"),
    ("mpiexec (PMI)", "PMI_SIZE", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_RANK"),
)

OPEN_MPI, MPICH = "openmpi", "mpich"
_LIBRARY_NAMES = {
    OPEN_MPI: "Open MPI",
    MPICH: "MPICH (or of its ABI: Intel MPI, MVAPICH, Cray MPICH)",
}
# Launchers that start the ranks of one library alone.
_LIBRARY_OF_LAUNCHER = {
    "mpirun (Open MPI)": OPEN_MPI,
    "mpirun (MVAPICH2)": MPICH,
    "mpiexec (Hydra)": MPICH,
}

# What launchers leave with their ranks, by how the names begin. A process that is started from a
# rank and inherits them takes itself for a part of the outer job: it hangs under Open MPI and
# aborts under MPICH, unless its own launcher overwrites all. Batch systems' variables would have it
# started on other nodes.
_LEFT_BY_LAUNCHERS = (
    "OMPI_", "PMIX", "PRTE", "PMI_", "HYDI", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "MPICH_INTERFACE_HOSTNAME", "MV2_COMM_WORLD_",
    "PALS_", "FLUX_", "SLURM", "PBS_", "LSB_", "PE_HOSTFILE",
)  # fmt: skip
# These begin like them, but are the user's: where the library lies, and what carries a message or a
# reduction.
_KEPT = (
    "OMPI_ALLOW_RUN_AS_ROOT", "PMIX_PREFIX", "PRTE_PREFIX", "OMPI_MCA_mca_base_component_",
    *(f"OMPI_MCA_{name}" for name in (
        "pml", "btl", "mtl", "coll", "osc", "bml", "smsc", "accelerator", "opal_", "mpool", "rcache", "common_", "op_",
    )),
)  # fmt: skip
# Settings on which it depends what the library does with memory of a device.
_FOR_DEVICES = (
    "OMPI_MCA_", "UCX_", "MPICH_", "MV2_", "FI_", "OPAL_PREFIX", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a job that is started from inside a job.

    Args:
        environ: Usually ``os.environ``.

    Returns:
        All of it but what a launcher or batch system left there; the user's settings of the MPI
        library stay.
    """
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(_KEPT) or not name.startswith(_LEFT_BY_LAUNCHERS)
    }


def device_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of the user's settings on which it depends what MPI does with memory of a device, by name."""
    kept = without_launcher(environ)
    return {name: kept[name] for name in sorted(kept) if name.startswith(_FOR_DEVICES)}


def from_environment(environ: Mapping[str, str]) -> Launch:
    """Read the launcher's variables.

    Args:
        environ: Usually ``os.environ``.

    Returns:
        The launcher, and what it said; ``Launch("python", None, None)`` for a plain process.
    """
    for launcher, mark, *names in _LAUNCHERS:
        if mark in environ:
            return Launch(launcher, *(_number(environ.get(name)) for name in names))
    return Launch("python", None, None)


def library_problem(launch: Launch, library: str) -> str | None:
    """Return why the launcher's ranks cannot start a library, or None if nothing speaks against it.

    A library that another one's launcher has started ends the process inside MPI_Init, or makes
    each rank a world of one.

    Args:
        launch: The launcher's word.
        library: ``OPEN_MPI`` or ``MPICH``, which stands for all libraries of its ABI.
    """
    needed = _LIBRARY_OF_LAUNCHER.get(launch.launcher)
    # Open MPI makes any process that it cannot connect a world of one, and that is all that one
    # rank needs.
    if needed is None or needed == library or (library == OPEN_MPI and launch.size == 1):
        return None
    return (
        f"{launch.launcher} started this rank, but the MPI library that Python would load is "
        f"{_LIBRARY_NAMES[library]}, whose "
        "ranks another MPI's launcher cannot start. Use the mpirun of that library, or set "
        "MPI4PY_LIBMPI to the libmpi.so of "
        f"{_LIBRARY_NAMES[needed]}"
    )


def singleton_problem(launch: Launch, mpi_size: int) -> str | None:
    """Say why a world of ``mpi_size`` ranks cannot be what the launcher started, or None if it can.

    MPI makes a process that it cannot connect a world of its own. Training on, each alone, would be
    silently wrong.
    """
    if mpi_size != 1 or launch.size is None or launch.size == 1:
        return None
    if launch.launcher == "torchrun":
        return (
            f"torchrun started {launch.size} processes, but MPI does not know torchrun: each would "
            "be a world of one. "
            f"Start the job with 'mpirun -n {launch.size} python ...' or 'srun -n {launch.size} "
            "python ...' instead"
        )
    return (
        f"{launch.launcher} started {launch.size} tasks, but MPI sees a world of one: the launcher "
        "and the MPI library that "
        "Python loads do not belong together. Use the mpirun of that library, or srun --mpi=pmix "
        "(Open MPI) / --mpi=pmi2 (MPICH)"
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
