"""Parser of the launcher's environment (mpirun, srun, PMI); strips it for child jobs.

Pure: works before MPI starts.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The launcher's variables of this process; ``None`` where a variable is missing.

    Attributes:
        launcher: The command that a user types: mpirun, srun, torchrun, …
        size: Number of tasks in this job step.
        local_rank: Index of this task on its node.
        rank: Index of this task among all.
    """

    launcher: str
    size: int | None
    local_rank: int | None
    rank: int | None = None


# (launcher, a variable that only its tasks have, tasks, local rank, rank); the first match wins.
# Slurm follows the MPI launchers, because mpirun inside an allocation passes the batch shell's
# SLURM_* variables to every rank.
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
# Launchers that can start the ranks of one library only.
_LIBRARY_OF_LAUNCHER = {
    "mpirun (Open MPI)": OPEN_MPI,
    "mpirun (MVAPICH2)": MPICH,
    "mpiexec (Hydra)": MPICH,
}

# Prefixes of the variables that launchers set for their ranks. A process that inherits them behaves
# as a part of the outer job: it hangs under Open MPI and aborts under MPICH, unless its own
# launcher overwrites all of them. With a batch system's variables its ranks would be started on
# other nodes.
_LAUNCHER_PREFIXES = (
    "OMPI_", "PMIX", "PRTE", "PMI_", "HYDI", "HYDRA_", "MPI_LOCAL", "MPIEXEC_",
    "MPICH_INTERFACE_HOSTNAME", "MV2_COMM_WORLD_", "PALS_", "FLUX_", "SLURM", "PBS_", "LSB_",
    "PE_HOSTFILE", "MPIDIST_APPNUM", "MPIDIST_RANK_MARK",
)  # fmt: skip
# Prefixes of the user's own settings among them: the library's location, and the components that
# carry messages and reductions.
_USER_PREFIXES = (
    "OMPI_ALLOW_RUN_AS_ROOT", "PMIX_PREFIX", "PRTE_PREFIX", "OMPI_MCA_mca_base_component_",
    *(f"OMPI_MCA_{name}" for name in (
        "pml", "btl", "mtl", "coll", "osc", "bml", "smsc", "accelerator", "opal_",
        "mpool", "rcache", "common_", "op_",
    )),
)  # fmt: skip
# Prefixes of settings that change what the library does with device memory.
_DEVICE_PREFIXES = (
    "OMPI_MCA_", "UCX_", "MPICH_", "MV2_", "FI_", "MPI4PY_LIBMPI",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
)  # fmt: skip

_JOB, _STEP, _LAUNCH = "MPIDIST_JOB", "SLURM_STEP_ID", "PMIX_NAMESPACE"
# Number of a batch system's job.
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_LONGEST_NAME = 80
_DIGEST_BYTES = 8


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program or job that a rank starts.

    ``subprocess.run(command, env=without_launcher(os.environ))``: the program is a world of one, or
    has what its own launcher says.

    Args:
        environ: Usually ``os.environ``.

    Returns:
        All variables except those of launchers and batch systems; the user's settings of the MPI
        library stay.
    """
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(_USER_PREFIXES) or not name.startswith(_LAUNCHER_PREFIXES)
    }


def device_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings that change what MPI does with device memory, by name."""
    kept = without_launcher(environ)
    return {name: kept[name] for name in sorted(kept) if name.startswith(_DEVICE_PREFIXES)}


def from_environment(environ: Mapping[str, str]) -> Launch:
    """Read the launcher's variables.

    Args:
        environ: Usually ``os.environ``.

    Returns:
        The variables; ``Launch("python", None, None)`` for a process without a launcher.
    """
    for launcher, mark, *names in _LAUNCHERS:
        if mark in environ:
            return Launch(launcher, *(_number(environ.get(name)) for name in names))
    return Launch("python", None, None)


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether these are a rank's variables, of a launcher that MPI knows (pure)."""
    return from_environment(environ).launcher not in ("python", "torchrun")


def has_job_name(environ: Mapping[str, str]) -> bool:
    """Return whether a new launch in this environment is of the same job (pure)."""
    return bool(_first(environ, _JOB, *_BATCH_JOBS))


def job_name(environ: Mapping[str, str], otherwise: str) -> str:
    """Return the name of a job in file names, the same for all of its starts (pure).

    Args:
        environ: Usually ``os.environ``.
        otherwise: The name of a job without one of its own.
    """
    return in_file_names(_first(environ, _JOB, *_BATCH_JOBS, _LAUNCH) or otherwise)


def start_name(environ: Mapping[str, str], otherwise: str) -> str:
    """Return the name of one start of a job in file names (pure).

    A batch job may start several programs at once, so its number does not tell them apart: Slurm's
    step 0 of the job 4711 is 4711.0. A job of a name that the user gives is one.

    Args:
        environ: Usually ``os.environ``.
        otherwise: The name of a start without one of its own.
    """
    batch_job = _first(environ, *_BATCH_JOBS)
    if environ.get(_JOB) or not batch_job:
        return job_name(environ, otherwise)
    is_step = from_environment(environ).launcher == "srun"
    start = _first(environ, *([_STEP] if is_step else []), _LAUNCH) or otherwise
    return in_file_names(f"{batch_job}.{start}")


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the first of these variables that is set and not empty; "" for none."""
    return next((environ[name] for name in names if environ.get(name)), "")


def in_file_names(job: str) -> str:
    """Return a job's name as its files have it: "a b" is a_b (pure).

    A long name ends with a digest of all of it, so that two of one beginning stay different.
    """
    name = re.sub(r"[^A-Za-z0-9.-]", "_", job)
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(os.fsencode(job), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 1]}-{digest}"


def program_number(environ: Mapping[str, str]) -> int | None:
    """Return ``MPIDIST_APPNUM``, which takes the place of MPI_APPNUM, or None (pure).

    srun starts all programs of ``--multi-prog`` as one, so a job script numbers them.

    Args:
        environ: Usually ``os.environ``.

    Raises:
        ValueError: It is no number of a program.
    """
    text = environ.get("MPIDIST_APPNUM")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"MPIDIST_APPNUM must be a program's number, 0 or more; got {text!r}")
    return int(text)


def is_on_one_node(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher's variables say that all ranks of this job share a node.

    A process without a launcher is a world of one. A launcher whose variables do not tell gives
    False.
    """
    launch = from_environment(environ)
    if launch.launcher == "python" or launch.size == 1:
        return True
    if launch.launcher == "mpirun (Open MPI)":
        return _number(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")) == launch.size
    return launch.launcher == "srun" and environ.get("SLURM_STEP_NUM_NODES") == "1"


def library_problem(launch: Launch, library: str) -> str | None:
    """Return why the launcher's ranks cannot start a library, or None if they can.

    A library under another library's launcher ends the process inside MPI_Init, or makes each rank
    a world of one.

    Args:
        launch: The launcher's variables.
        library: ``OPEN_MPI`` or ``MPICH`` (any library of its ABI).
    """
    needed = _LIBRARY_OF_LAUNCHER.get(launch.launcher)
    # Open MPI makes a world of one of any process that it cannot connect, which is right for a job
    # of one rank.
    if needed is None or needed == library or (library == OPEN_MPI and launch.size == 1):
        return None
    return (
        f"{launch.launcher} started this rank, but the MPI library that Python would load is "
        f"{_LIBRARY_NAMES[library]}, whose "
        "ranks another MPI's launcher cannot start. Use 'mpidist run', which finds the mpirun of "
        "that library, or set "
        "MPI4PY_LIBMPI to the libmpi.so of "
        f"{_LIBRARY_NAMES[needed]}"
    )


def singleton_problem(launch: Launch, mpi_size: int) -> str | None:
    """Return why a world of ``mpi_size`` ranks contradicts the launcher, or None.

    MPI makes a world of one of a process that it cannot connect. Training in such worlds would be
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


def alone(size: int, source: str) -> str:
    """Return the error of a process that is one of several, and that MPI made a world of one.

    Args:
        size: The number of processes.
        source: What says so, for example ``WORLD_SIZE=2``.
    """
    return (
        f"{source} says {size} processes, but no MPI launcher has connected them: MPI sees a world "
        "of one, and each would train alone. torchrun, torch.multiprocessing.spawn and Ray start "
        f"processes without MPI; start the script with 'mpirun -n {size} python ...' or 'srun -n "
        f"{size} python ...' instead, which start all {size}, and spawn none in it"
    )


def announced_size(environ: Mapping[str, str], ours: Collection[str]) -> int | None:
    """Return ``WORLD_SIZE`` where a launcher has set it and ``RANK``, else None.

    Args:
        environ: Usually ``os.environ``.
        ours: Names of variables that mpidist has set for a parent process.
    """
    if "RANK" not in environ or {"RANK", "WORLD_SIZE"} & set(ours):
        return None
    return _number(environ.get("WORLD_SIZE"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
