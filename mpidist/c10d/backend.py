"""Registration of the backend ``mpidist`` and of the ``mpi://`` rendezvous with torch.

``import torch`` calls ``autoload`` (entry point group ``torch.backends``), which registers both and
starts neither MPI nor CUDA. ``autoload`` never raises, because an error in an entry point would
make ``import torch`` fail.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs, urlparse

from mpidist.comm.mpi.launcher_env import alone, from_environment
from mpidist.comm.mpi.torchrun_env import disagreement
from mpidist.gc_pause import collector_paused

if TYPE_CHECKING:
    import torch.distributed
    from torch.distributed.distributed_c10d import _DistributedBackendOptions as BackendOptions

    from mpidist.comm.group import ProcessGroup
    from mpidist.comm.mpi.world import World

# Result of a rendezvous: the store, this rank, and the number of ranks.
Found: TypeAlias = "tuple[torch.distributed.Store, int, int]"

_NAME = "mpidist"
_SCHEME = "mpi"
_MEETING_S = 60.0  # longest wait for the members of a group that meet by a store of the user's
_OF_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torch's env:// needs
_ADVICE = (
    "set MPIDIST_REPLACE={} in their environment, and {} is mpidist's, which needs none of these "
    "variables; so does {}"
)
# "undefined" is torch's word for no name.
_REPLACEABLE = ("gloo", "nccl", "mpi", "undefined")


def autoload() -> None:
    """Register with torch; called by ``import torch``. Warns on failure and never raises."""
    try:
        _register()
    except Exception as error:
        warnings.warn(f"mpidist could not register its backend with torch: {error!r}", stacklevel=2)


def _register() -> None:
    # At module level, an import of this module before torch would let torch call autoload before
    # autoload is defined.
    import torch

    if not torch.distributed.is_available():
        return
    import torch.distributed as dist

    # torch.distributed.rendezvous is a function of the same name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if _NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    # torch >= 2.15 attaches its flight recorder to every group of a backend that is not in this
    # set. The recorder retires an entry of a Python backend when the call is issued, so it would
    # report a collective that hangs as one that has ended.
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    if hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS"):
        c10d._FR_SELF_RECORDING_BACKENDS.add(_NAME)
    for module in ("flight_dump", "hooks"):
        importlib.import_module(f"mpidist.c10d.{module}").install()
    if _SCHEME not in rendezvous._rendezvous_handlers:
        rendezvous.register_rendezvous_handler(_SCHEME, _rendezvous)
        # init_process_group("mpidist") without a URL uses env://, which needs RANK, WORLD_SIZE,
        # MASTER_ADDR and MASTER_PORT.
        for scheme in ("env", "tcp"):
            rendezvous._rendezvous_handlers[scheme] = _or_mpi(
                rendezvous._rendezvous_handlers[scheme], scheme
            )
    replaces = os.environ.get("MPIDIST_REPLACE")
    stand_in = (
        importlib.import_module("mpidist.c10d.replacement").install() if replaces else _as_given
    )
    importlib.import_module("mpidist.c10d.names").install(stand_in)


def _as_given(named: str) -> str:
    if os.environ.get("MPIDIST_REPLACE"):
        raise ValueError(
            "MPIDIST_REPLACE was set after `import torch`, which reads it; set it in the "
            "environment of all ranks, or above that "
            "import"
        )
    return named


def _rendezvous(url: str, **kwargs: Any) -> Iterator[Found]:
    with collector_paused():
        from mpidist.comm.store.rendezvous import rendezvous

    yield from rendezvous(url, **kwargs)


def _or_mpi(
    torch_handler: Callable[..., Iterator[Found]], scheme: str
) -> Callable[..., Iterator[Found]]:
    """Return a handler that uses ``mpi://`` for mpidist if ``env://`` lacks one of its variables.

    Other backends still get torch's error. With MPIDIST_REPLACE, ``env://`` and ``tcp://`` always
    use ``mpi://``.
    """

    def handler(url: str, **kwargs: object) -> Iterator[Found]:
        if not _initialises_mpidist():
            return _with_advice(torch_handler(url, **kwargs))
        if os.environ.get("MPIDIST_REPLACE"):
            return _rendezvous(url, environ=os.environ if scheme == "env" else {}, **kwargs)
        if scheme == "env":
            numbers = _numbers_of_environment(url)
            if "TORCHELASTIC_RUN_ID" in os.environ or not all(map(os.environ.get, _OF_ENV)):
                return _rendezvous(url, environ=numbers, **kwargs)
            _require_rank_of_launcher(numbers)
        return torch_handler(url, **kwargs)

    return handler


def _numbers_of_environment(url: str) -> dict[str, str]:
    """Return ``RANK`` and ``WORLD_SIZE`` as far as the caller has not given them as arguments."""
    given = parse_qs(urlparse(url).query)
    return {
        name: os.environ[name]
        for name in ("RANK", "WORLD_SIZE")
        if name in os.environ and name.lower() not in given
    }


def _require_rank_of_launcher(numbers: Mapping[str, str]) -> None:
    """Refuse a ``RANK`` of another rank, before torch's rendezvous waits for the missing one."""
    launch = from_environment(os.environ)
    if launch.rank is None or launch.size in (None, 1) or "RANK" not in numbers:
        return
    problem = disagreement({"RANK": numbers["RANK"]}, launch.rank, launch.size)
    if problem is not None:
        raise ValueError(f"rank {launch.rank} of {launch.size}: {problem}")


def _with_advice(results: Iterator[Found]) -> Iterator[Found]:
    """Add advice to torch's error about missing variables if an MPI launcher started the ranks.

    The advice is for RPC, and for groups of the backends that MPIDIST_REPLACE replaces.
    """
    advice = None
    if _local_of("init_rpc", "name") is not None:
        advice = _ADVICE.format("rpc", "torch.distributed.rpc", "import mpidist.rpc as rpc")
    elif any(name in _REPLACEABLE for name in _requested_backends()):
        advice = _ADVICE.format(
            "gloo,nccl,mpi", "the group", 'backend="mpidist" where the script names it'
        )
    try:
        yield from results
    except ValueError as error:
        launch = from_environment(os.environ)
        if (
            advice is None
            or "expected, but not set" not in str(error)
            or launch.launcher == "torchrun"
            or (launch.size or 1) == 1
        ):
            raise
        raise ValueError(
            f"{error}. {launch.launcher} started {launch.size} ranks: {advice}"
        ) from error


def _initialises_mpidist() -> bool:
    return _NAME in _requested_backends()


def _requested_backends() -> list[str]:
    # torch passes no backend name to a rendezvous handler.
    named = str(_local_of("init_process_group", "backend")).lower().split(",")
    return [part.split(":")[-1] for part in named]


def _local_of(function: str, name: str) -> Any:
    """Return a local variable of the innermost caller with a function's name, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def _require_alike(native: ProcessGroup, listed: str) -> None:
    """Compare the backends that the ranks requested, once per job.

    Collective: over the group, which is closed on a difference.
    """
    from mpidist.comm.consistency import values_that_differ

    values = values_that_differ(native, listed)
    if values is not None:
        native.close()
        raise ValueError(
            f"init_process_group got other backends on other ranks; give all the same. {values}"
        )


def _native_of_default() -> ProcessGroup:
    """Return the native group behind torch's default group.

    Raises:
        RuntimeError: The default group is on another backend.
    """
    import torch.distributed as dist

    from mpidist.c10d.native import native_of

    native = native_of(dist.distributed_c10d._get_default_group())
    if native is None:
        raise RuntimeError(
            'new_group(backend="mpidist") needs a default group on mpidist, whose ranks MPI '
            "knows; the default is on "
            f'{dist.get_backend()}. Make that one with init_process_group("mpidist"), or '
            '"cpu:mpidist,cuda:nccl"; with '
            "MPIDIST_REPLACE name its backend there, too"
        )
    return native


def _members(options: BackendOptions, world: World) -> list[int]:
    """Return the world ranks of a default group of fewer ranks than the job has.

    Collective: over the members, which find each other by the group's store.

    Raises:
        ValueError: A rank of MPI has come twice (all members).
    """
    keys = [f"mpidist/{options.group_id}/{rank}" for rank in range(options.group_size)]
    options.store.set(keys[options.group_rank], str(world.rank))
    options.store.wait(keys, timedelta(seconds=_MEETING_S))
    members = [int(options.store.get(key)) for key in keys]
    if len(set(members)) < len(members):
        raise ValueError(
            f"rank {world.rank} of {world.size}: init_process_group got "
            f"world_size={options.group_size} from processes that are MPI's ranks {members}: "
            "they are not distinct ranks of one job of MPI"
        )
    return members


def _create(
    options: BackendOptions, backend_options: object = None
) -> torch.distributed.ProcessGroup:
    """Create a process group for torch, which calls this on the group's members only."""
    import torch
    import torch.distributed as dist

    with collector_paused():
        from mpidist import torch_version
        from mpidist.c10d import generation, sends, shrinking
        from mpidist.c10d.native import KEY
        from mpidist.comm import world_group
        from mpidist.comm.mpi import creation_barrier, runtime

    shrinking.install()
    sends.install()
    config = _local_of("_new_process_group_helper", "backend_config")
    backends = dict(config.get_device_backend_map()) if config is not None else {}
    is_shared = bool(set(backends.values()) - {_NAME})
    if is_shared:
        other_backends = importlib.import_module("mpidist.c10d.other_backends")
        other_backends.require_known(backends)
    world = runtime.world(creation_barrier.start_limit(options.timeout.total_seconds() or None))
    ranks = list(options.global_ranks_in_group)
    name, timeout = str(options.group_id), options.timeout
    if ranks:
        # By the order of calls: torch's names count the groups that each rank has made, and differ
        # where some ranks alone made one (``use_local_synchronization``).
        native = _native_of_default().new_group(ranks, name, timeout, key=KEY)
        assert native is not None
    else:
        if options.group_size > world.size:
            text = (
                alone(options.group_size, f"init_process_group's world_size={options.group_size}")
                if world.size == 1
                else f"init_process_group got world_size={options.group_size}, but MPI started "
                f"{world.size} ranks; start as many with mpirun or srun, or use "
                "init_method='mpi://', which asks MPI"
            )
            raise ValueError(f"rank {world.rank} of {world.size}: {text}")
        shown = name if name != "0" else "world"
        if options.group_size < world.size:
            native = world_group.from_members(_members(options, world), shown, timeout)
        else:
            native = world_group.from_world(shown, timeout, key=options.group_rank)
        _require_alike(
            native, ",".join(f"{device}:{backend}" for device, backend in backends.items())
        )
        if native.rank == 0:
            torch_version.warn_if_newer(torch.__version__)
    device_id = _local_of("_new_process_group_helper", "device_id")
    if is_shared:
        return other_backends.mixed_group(native, options, backends, device_id, backend_options)
    parent = getattr(dist.distributed_c10d._get_default_group(), "origin", None) if ranks else None
    origin = None
    if parent or getattr(options, "enable_reconfigure", False):
        reconfiguring = importlib.import_module("mpidist.c10d.reconfiguring")
        origin = reconfiguring.origin_of(native, parent)
    group_of_torch = generation.group_of_torch(native, options.store, name, origin)
    # torch has set it on the group object that this one replaces.
    group_of_torch.bound_device_id = device_id
    return group_of_torch
