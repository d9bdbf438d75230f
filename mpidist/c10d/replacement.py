"""``MPIDIST_REPLACE=gloo,nccl,mpi,ddp``: groups that a script or framework makes by torch's own names are mpidist's.

``install`` is called by ``import torch`` where the variable is set, and patches what those names pass through:

- ``Backend(name)``, by which torch reads every backend name, as ``init_process_group`` and ``new_group`` call it;
- ``is_nccl_available`` and ``is_mpi_available`` of ``torch.distributed``, which frameworks ask first;
- with the word ``ddp`` the name ``DistributedDataParallel`` (``ddp_name``).

It sets the variables of torchrun that frameworks read from those of the launcher. Neither MPI nor CUDA is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpidist.c10d import ddp_name
from mpidist.comm.torch_variables import torch_variables

VARIABLE = "MPIDIST_REPLACE"
BACKENDS = ("gloo", "nccl", "mpi")
DDP = "ddp"
OURS = "mpidist"

# The functions of torch that make groups; a name that is read elsewhere is only read.
_MAKERS = ("init_process_group", "_new_group_with_tag")
_active: Replacement | None = None


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

        Args:
            named: One name, a list as ``"cpu:gloo,cuda:nccl"``, or ``"undefined"``: none was given.
        """
        if not self.backends:
            return named
        if ":" not in named:
            return OURS if named in (*self.backends, "undefined") else named
        pairs = [part.partition(":") for part in named.split(",")]
        chosen = [(device, OURS if name in self.backends else name) for device, _, name in pairs]
        if all(name == OURS for _, name in chosen):
            return OURS
        return ",".join(f"{device}:{name}" for device, name in chosen)


def parse(environ: Mapping[str, str]) -> Replacement | None:
    """Read ``MPIDIST_REPLACE``; pure. Return None where it is not set, or empty."""
    text = environ.get(VARIABLE, "")
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if not words:
        return None
    unknown = [word for word in words if word not in (*BACKENDS, DDP)]
    problem = None
    if unknown:
        problem = (
            f"{VARIABLE}={text!r} has {', '.join(map(repr, unknown))}, which it does not know; write a list of "
            f"{', '.join(BACKENDS)} and {DDP}, as {VARIABLE}=gloo,nccl,mpi, or unset it"
        )
    elif "TORCHELASTIC_RUN_ID" in environ:
        size = environ.get("WORLD_SIZE", "N")
        problem = (
            f"{VARIABLE}={text} has MPI carry this script's groups, but torchrun, or a launcher built on it, started the "
            f"script, and MPI does not know its processes. Start it with 'mpirun -n {size} python ...' or 'srun -n {size} "
            f"python ...' instead, or unset {VARIABLE}"
        )
    return Replacement(tuple(name for name in BACKENDS if name in words), DDP in words, problem)


def active() -> Replacement | None:
    """Return the replacement that is installed in this process, or None."""
    return _active


def install() -> None:
    """Patch torch by ``os.environ``; without the variable nothing is touched."""
    global _active
    chosen = parse(os.environ)
    if chosen is None or _active is not None:
        return
    _active = chosen
    import torch.distributed as dist

    dist.Backend.__new__ = staticmethod(_naming(dist.Backend.__new__, chosen))  # type: ignore[method-assign]
    if chosen.problem is not None:
        return
    os.environ.update(torch_variables(os.environ))
    for name in ("mpi", "nccl"):
        if name in chosen.backends:
            # torch's own module keeps its answer: it names ProcessGroupNCCL where that is True.
            setattr(dist, f"is_{name}_available", _available)
    if chosen.ddp:
        ddp_name.install()


def _available() -> bool:
    """Say that the backend is there: MPIDIST_REPLACE has mpidist stand in for it."""
    return True


def _naming(original: Callable[..., str], chosen: Replacement) -> Callable[..., str]:
    def new(cls: type, name: str) -> str:
        value = original(cls, name)
        if sys._getframe(1).f_code.co_name not in _MAKERS:
            return value
        if chosen.problem is not None:
            raise ValueError(chosen.problem)
        return chosen.backend(value)

    return new
