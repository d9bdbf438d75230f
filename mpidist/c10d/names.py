"""Backend names of ``init_process_group`` and ``new_group``: lists, replacements and mistakes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable

OURS = "mpidist"
_MPI = "mpi"
# Functions of torch that create groups; names read by other functions stay as they are.
_MAKERS = ("init_process_group", "_new_group_with_tag")
_MPI_LIBRARIES = ("openmpi", "ompi", "mpich", "mpi4py", "mvapich", "intelmpi", "impi")


def install(stand_in: Callable[[str], str]) -> None:
    """Let torch create groups under the names that ``stand_in`` returns.

    The hook is ``Backend.__new__``: torch parses every backend name by ``Backend(name)``, also in
    functions that were imported earlier.

    Args:
        stand_in: Receives one name, a list such as ``"cpu:gloo,cuda:nccl"``, or ``"undefined"`` if
            the caller gave no name.
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
    """Split ``"cpu:gloo,cuda:nccl"`` into (device, name) pairs; a single name has device ``""``."""
    return [
        (device, name) if colon else ("", device)
        for device, colon, name in (part.partition(":") for part in named.split(","))
    ]


def joined(listed: Iterable[tuple[str, str]]) -> str:
    """Join (device, name) pairs into a list for torch."""
    return ",".join(f"{device}:{name}" if device else name for device, name in listed)


def ours_first(named: str) -> str:
    """Move mpidist to the front of a list.

    torch creates the backends before mpidist in the list itself, but mpidist has to check the whole
    list first.
    """
    listed = pairs(named)
    return joined(sorted(listed, key=lambda pair: pair[1] != OURS)) if len(listed) > 1 else named


def mistaken(named: str, known: Iterable[str], has_mpi: bool) -> str | None:
    """Return an error text for a name that probably means mpidist, or None.

    Args:
        named: The name or list that torch would create a group with.
        known: Names of the backends registered with torch.
        has_mpi: This torch was built with its own backend ``mpi``.
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
    # Imported here, because this module is part of every import of torch.
    from difflib import SequenceMatcher

    return SequenceMatcher(None, name, OURS).ratio() > 0.7
