"""The name of a backend as ``init_process_group`` and ``new_group`` read it: lists of names, stand-ins, and what was mistaken."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable

OURS = "mpidist"
_MPI = "mpi"
# The functions of torch that make groups; a name that is read elsewhere is only read.
_MAKERS = ("init_process_group", "_new_group_with_tag")
_MPI_LIBRARIES = ("openmpi", "ompi", "mpich", "mpi4py", "mvapich", "intelmpi", "impi")


def install(stand_in: Callable[[str], str]) -> None:
    """Have torch make groups by the names that ``stand_in`` returns for those that it is given.

    torch reads every backend name by ``Backend(name)``, wherever its functions were imported by
    name before this.

    Args:
        stand_in: Gets one name, a list as ``"cpu:gloo,cuda:nccl"``, or ``"undefined"``: none was
            given.
    """
    import torch.distributed as dist

    original = dist.Backend.__new__

    def new(cls: type, name: str) -> str:
        value = original(cls, name)
        if sys._getframe(1).f_code.co_name not in _MAKERS:
            return value
        value = stand_in(value)
        has_mpi = importlib.import_module("torch.distributed.distributed_c10d").is_mpi_available()
        problem = mistaken(value, dist.Backend.backend_list, has_mpi)
        if problem is not None:
            raise ValueError(problem)
        return ours_first(value)

    dist.Backend.__new__ = staticmethod(new)  # type: ignore[method-assign]


def pairs(named: str) -> list[tuple[str, str]]:
    """Split ``"cpu:gloo,cuda:nccl"`` into pairs of device and name; a lone name has the device ``""``."""
    return [
        (device, name) if colon else ("", device)
        for device, colon, name in (part.partition(":") for part in named.split(","))
    ]


def joined(listed: Iterable[tuple[str, str]]) -> str:
    """Write pairs of device and name as a list for torch."""
    return ",".join(f"{device}:{name}" if device else name for device, name in listed)


def ours_first(named: str) -> str:
    """Put our backend at the head of a list: torch makes what stands before it, and ours has to look first whether it can."""
    listed = pairs(named)
    return joined(sorted(listed, key=lambda pair: pair[1] != OURS)) if len(listed) > 1 else named


def mistaken(named: str, known: Iterable[str], has_mpi: bool) -> str | None:
    """Return what to write instead of a name by which somebody means us; None for every other.

    Args:
        named: What torch would make a group by.
        known: Names of the backends that torch knows.
        has_mpi: This torch was built with a backend ``mpi`` of its own.
    """
    listed = pairs(named)
    has_ours = any(OURS in pair for pair in listed)
    if has_ours and any(device == OURS or (not device and len(listed) > 1) for device, _ in listed):
        return (
            f'"{named}" is no list of devices and backends: write "cpu:{OURS},cuda:nccl", or '
            f'"{OURS}" for all devices'
        )
    for _, name in listed:
        if name == _MPI and not has_mpi:
            return (
                'backend="mpi" needs a torch that was built from source with MPI, which this one '
                "was not. Write "
                f'backend="{OURS}", or set MPIDIST_REPLACE=mpi in the environment of all ranks, '
                f'and "mpi" means {OURS}'
            )
        if name not in known and (name in _MPI_LIBRARIES or _resembles_ours(name)):
            return (
                f'torch knows no backend "{name}". Write backend="{OURS}": it uses the MPI library '
                "with which mpirun or srun "
                "started the job"
            )
    return None


def _resembles_ours(name: str) -> bool:
    from difflib import SequenceMatcher  # not above: every import of torch would pay for it

    return SequenceMatcher(None, name, OURS).ratio() > 0.7
