"""``MPIDIST_REPLACE=gloo,nccl,mpi,ddp``: groups that a script or framework makes by torch's own names are mpidist's.

``install`` is called by ``import torch`` where the variable is set. ``Replacement.backend`` is what
``names`` has torch make groups by. ``is_nccl_available`` and ``is_mpi_available`` of
``torch.distributed``, which frameworks ask first, say yes, and ``monitored_barrier``, which torch
allows Gloo alone, takes our groups. With the word ``ddp`` the name ``DistributedDataParallel`` is
ours, too (``ddp_name``).

It sets the variables of torchrun that frameworks read from those of the launcher. Neither MPI nor
CUDA is started.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpidist.c10d import ddp_name, names, overrides
from mpidist.comm.mpi.torchrun_env import torch_variables

VARIABLE = "MPIDIST_REPLACE"
BACKENDS = ("gloo", "nccl", "mpi")
DDP = "ddp"

_NOT_GIVEN = "undefined"  # torch's word
_ASKING_FOR_NCCL_ITSELF = ("torch.nn.", "torch._inductor.")


@dataclass(frozen=True)
class Replacement:
    """The words of ``MPIDIST_REPLACE``.

    Attributes:
        backends: Names of torch's backends whose groups are ours.
        ddp: torch's DistributedDataParallel is ours.
        problem: Reason why none of it can be, raised by whoever makes a group; None without one.
    """

    backends: tuple[str, ...] = ()
    ddp: bool = False
    problem: str | None = None

    def backend(self, named: str) -> str:
        """Return the name under which torch makes a group that was asked for as ``named``.

        Raises:
            ValueError: None of it can be.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        if not self.backends:
            return named
        if named == _NOT_GIVEN:
            return names.OURS
        chosen = [
            (device, names.OURS if name in self.backends else name)
            for device, name in names.pairs(named)
        ]
        return names.OURS if all(name == names.OURS for _, name in chosen) else names.joined(chosen)


def parse(environ: Mapping[str, str]) -> Replacement | None:
    """Read ``MPIDIST_REPLACE``; pure. Return None where it is not set, or empty."""
    text = environ.get(VARIABLE, "")
    if not text.strip():
        return None
    # "," is no list of nothing: it is a mistake.
    words = [word.strip().lower() for word in text.split(",") if word.strip()] or [text]
    unknown = [word for word in words if word not in (*BACKENDS, DDP)]
    problem = None
    if unknown:
        problem = (
            f"{VARIABLE}={text!r} has {', '.join(map(repr, unknown))}, which it does not know; "
            "write a list of "
            f"{', '.join(BACKENDS)} and {DDP}, as {VARIABLE}=gloo,nccl,mpi, or unset it"
        )
    elif "TORCHELASTIC_RUN_ID" in environ:
        size = environ.get("WORLD_SIZE", "N")
        problem = (
            f"{VARIABLE}={text} has MPI carry this script's groups, but torchrun, or a launcher "
            "built on it, started the "
            f"script, and MPI does not know its processes. Start it with 'mpirun -n {size} python "
            f"...' or 'srun -n {size} "
            f"python ...' instead, or unset {VARIABLE}"
        )
    return Replacement(tuple(name for name in BACKENDS if name in words), DDP in words, problem)


def install() -> Callable[[str], str]:
    """Patch torch by ``os.environ``; without the variable nothing is touched.

    Returns:
        The name of the backend for a name that torch is given.
    """
    chosen = parse(os.environ)
    if chosen is None:
        return str
    if chosen.problem is None:
        _patch(chosen)
    return functools.partial(_in_rank, chosen)


def _in_rank(chosen: Replacement, named: str) -> str:
    # What multiprocessing has started, such as torch's for asynchronous checkpoints, is no rank;
    # its groups are torch's.
    return named if multiprocessing.parent_process() is not None else chosen.backend(named)


def _patch(chosen: Replacement) -> None:
    import torch.distributed as dist

    os.environ.update(torch_variables(os.environ, socket.gethostname()))
    for name in ("mpi", "nccl"):
        if name in chosen.backends:
            # distributed_c10d keeps its own answer under the same name: it names ProcessGroupNCCL
            # where that is True.
            setattr(dist, f"is_{name}_available", _available(getattr(dist, f"is_{name}_available")))
    if "gloo" in chosen.backends:
        overrides.override_monitored_barrier()
    if chosen.ddp:
        ddp_name.install()


def _available(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def available() -> bool:
        # Those parts of torch ask NCCL for its version next.
        needs_nccl = (
            sys._getframe(1).f_globals.get("__name__", "").startswith(_ASKING_FOR_NCCL_ITSELF)
        )
        return original() if needs_nccl else True

    return available
