"""Start of a job: examines the machine, then replaces this process by the launcher (exec).

After exec, signals reach the launcher, and the exit status is the job's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from mpidist.cli import launcher_watch, srun_types
from mpidist.cli.launch_plan import Plan, plan, program_of
from mpidist.cli.launch_request import Request, Site, has_children, in_allocation
from mpidist.comm.discovery import installed
from mpidist.comm.mpi.library import SHARED_MEMORY, free_bytes, home
from mpidist.errors import LaunchError

_LIST_S = 20.0  # limit for srun --mpi=list


def site(environ: Mapping[str, str]) -> Site:
    """Return MPI library and launchers of this machine; loads the library without starting MPI.

    Raises:
        LaunchError: There is no MPI library.
    """
    library = installed.installed()
    srun = shutil.which("srun") or "" if in_allocation(environ) else ""
    return Site(
        abi=library.abi,
        library=library.text,
        library_file=library.file,
        mpirun=library.mpirun,
        srun=srun,
        mpi_types=_mpi_types(srun) if srun else (),
        cores=physical_cores(os.sched_getaffinity(0)),
        is_root=os.geteuid() == 0,
        home=home(environ),
        shm_free_bytes=free_bytes(SHARED_MEMORY),
    )


def program(words: tuple[str, ...], module: str = "") -> tuple[str, ...]:
    """Return the command line of one rank.

    Raises:
        LaunchError: The script or program does not exist.
    """
    return program_of(
        words,
        module,
        sys.executable,
        lambda name: Path(name).is_file() if _is_script(name) else _is_program(name),
    )


def start(request: Request, is_dry: bool) -> None:
    """Replace this process by the launcher, or print the command line and return.

    Raises:
        LaunchError: The request cannot be carried out.
    """
    planned = plan(request, site(os.environ), os.environ)
    if request.ulfm and not is_dry and has_children(request, os.environ):
        launcher_watch.start(os.getpid())
    become(planned, is_dry)


def become(planned: Plan, is_dry: bool) -> None:
    """Replace this process by a planned program, or print the command line and return.

    Raises:
        LaunchError: The program cannot be started.
    """
    if is_dry:
        print(text_of(planned))
        return
    for note in planned.notes:
        print(f"mpidist run: {note}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(planned.argv[0], list(planned.argv), {**os.environ, **planned.variables})
    except OSError as error:
        raise LaunchError(f"{planned.argv[0]} does not start: {error}") from error


def physical_cores(usable: Collection[int], folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of physical cores of these hardware threads: Open MPI's slots."""
    siblings = set()
    for thread in usable:
        try:
            listed = folder / f"cpu{thread}" / "topology" / "thread_siblings_list"
            siblings.add(listed.read_text(encoding="utf-8").strip())
        except OSError:
            siblings.add(str(thread))
    return len(siblings)


def text_of(planned: Plan) -> str:
    """Return the command line in shell syntax."""
    variables = [f"{name}={text}" for name, text in planned.variables.items()]
    return shlex.join([*(["env", *variables] if variables else []), *planned.argv])


def _mpi_types(srun: str) -> tuple[str, ...]:
    try:
        done = subprocess.run(
            [srun, "--mpi=list"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return srun_types.parse(f"{done.stdout}\n{done.stderr}")


def _is_script(name: str) -> bool:
    return name.endswith(".py")


def _is_program(name: str) -> bool:
    return shutil.which(name) is not None
