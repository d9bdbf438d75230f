"""Command-line options of srun, Open MPI's mpirun and MPICH's Hydra for one request; pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from mpidist.cli.launch_request import Request, Site, is_one_node
from mpidist.errors import LaunchError

# A process that has sent no heartbeat for the timeout counts as dead; Open MPI asks for more than
# three periods. The heartbeats have a thread of their own, because a rank may compute for longer.
_HEARTBEAT = {
    "mpi_ft_detector": "1",
    "mpi_ft_detector_thread": "1",
    "mpi_ft_detector_period": "0.2",
    "mpi_ft_detector_timeout": "0.8",
}
_SRUN_BINDINGS = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}
# Steps of a Slurm job that srun has not started: the batch script and the shell of salloc
# (SLURM_BATCH_SCRIPT and SLURM_INTERACTIVE_STEP in slurm.h).
_SHELL_STEPS = ("4294967291", "4294967290")


def program_words(program: Sequence[str]) -> tuple[str, ...]:
    """Return a program and its arguments as mpirun or srun has to get them.

    Both divide their command line into several programs at a word ":". The shell gets one then.
    """
    if ":" not in program:
        return tuple(program)
    return ("/bin/sh", "-c", f"exec {shlex.join(program)}")


def srun_command(
    request: Request, site: Site, environ: Mapping[str, str], mpi_type: str
) -> tuple[str, ...]:
    """Return the command line of srun, including the program."""
    argv = [site.srun, f"--mpi={mpi_type}"]
    if request.ranks is not None:
        argv.append(f"--ntasks={request.ranks}")
    if request.nodes is not None:
        argv.append(f"--nodes={request.nodes}")
    if request.binding:
        argv.append(f"--cpu-bind={_SRUN_BINDINGS[request.binding]}")
    if request.tags:
        argv.append("--label")
    # The step of `srun --pty bash` has all resources of the job.
    if environ.get("SLURM_STEP_ID", _SHELL_STEPS[0]) not in _SHELL_STEPS:
        argv.append("--overlap")
    # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task.
    if "SLURM_CPUS_PER_TASK" in environ:
        argv.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    # A rank that dies ends the job, because the other ranks would wait for this rank.
    return (*argv, "--kill-on-bad-exit=1", *program_words(request.program))


def mpirun_options(
    request: Request, site: Site, environ: Mapping[str, str], ranks: int, variables: dict[str, str]
) -> list[str]:
    """Return the options of Open MPI's mpirun.

    Args:
        variables: Environment of mpirun; the permission to run as root is added.

    Raises:
        LaunchError: ULFM with a version before 5.
    """
    if request.ulfm and site.open_mpi_major not in (0, *range(5, 100)):
        raise LaunchError(f"--ft needs Open MPI 5 or newer; this is {site.library.splitlines()[0]}")
    options = ["-n", str(ranks)]
    if is_one_node(request, environ) and ranks > site.cores:
        options.append("--oversubscribe")
    # The default is not to bind, because a rank has several threads: torch's, mpidist's, the data
    # loader's.
    is_newer = site.open_mpi_major >= 5
    options += [
        "--bind-to",
        "package" if request.binding == "socket" and is_newer else request.binding or "none",
    ]
    if request.hosts:
        options += ["--host", ",".join(request.hosts)]
    if request.hostfile:
        options += ["--hostfile", request.hostfile]
    if request.nodes is not None:
        options += ["--map-by", f"ppr:{-(-ranks // request.nodes)}:node"]
    if request.tags:
        options += ["--output", "tag"] if is_newer else ["--tag-output"]
    if request.ulfm:
        options += ["--with-ft", "ulfm"]
    if request.heartbeat:
        for name, value in _HEARTBEAT.items():
            options += ["--mca", name, value]
    if site.is_root:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        variables.update({name: "1" for name in names if name not in environ})
    # Open MPI forwards its own variables to other nodes, and others only with -x; each node has a
    # home.
    exported = sorted(
        {
            *variables,
            *(name for name in environ if name.startswith("MPIDIST_") or name == "OMP_NUM_THREADS"),
        }
    )
    if not is_one_node(request, environ):
        options += [
            word
            for name in exported
            if not name.startswith("OMPI_") and name != "HOME"
            for word in ("-x", name)
        ]
    return options


def hydra_options(request: Request, ranks: int) -> list[str]:
    """Return the options of MPICH's mpiexec.

    Raises:
        LaunchError: ULFM.
    """
    if request.ulfm:
        raise LaunchError(
            "--ft needs Open MPI 5: MPICH has no ULFM, by which a group survives a dead rank"
        )
    options = ["-n", str(ranks)]
    if request.binding:
        options += ["-bind-to", request.binding]
    if request.hosts:
        options += ["-hosts", ",".join(request.hosts)]
    if request.hostfile:
        options += ["-f", request.hostfile]
    if request.nodes is not None:
        options += ["-ppn", str(-(-ranks // request.nodes))]
    return [*options, "-prepend-rank"] if request.tags else options
