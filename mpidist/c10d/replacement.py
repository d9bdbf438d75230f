"""Replacement of torch's backends by mpidist: ``MPIDIST_REPLACE=gloo,nccl,mpi,ddp,rpc``.

``import torch`` calls ``install`` if the variable is set. Groups that a script or framework creates
under torch's backend names are then groups of mpidist (``names``). ``is_nccl_available`` and
``is_mpi_available`` of ``torch.distributed`` return True, and ``monitored_barrier`` takes the
groups. With the word ``ddp``, ``DistributedDataParallel`` is replaced, too (``ddp_name``); with
``rpc``, RPC, distributed autograd, its optimizer and ``RemoteModule`` (``rpc_names``).

``install`` also sets torchrun's environment variables from the launcher's, because frameworks read
them. It starts neither MPI nor CUDA.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from mpidist.c10d import ddp_name, generation, names, rpc_names
from mpidist.comm.mpi.torchrun_env import torch_variables

VARIABLE = "MPIDIST_REPLACE"
BACKENDS = ("gloo", "nccl", "mpi")
DDP = "ddp"
RPC = "rpc"

_NOT_GIVEN = "undefined"  # torch's word
_ASKING_FOR_NCCL_ITSELF = ("torch.nn.", "torch._inductor.")


@dataclass(frozen=True)
class Replacement:
    """The parsed value of ``MPIDIST_REPLACE``.

    Attributes:
        backends: Names of the replaced backends.
        ddp: torch's DistributedDataParallel is replaced.
        rpc: torch's RPC and distributed autograd are replaced.
        problem: Error text if nothing can be replaced, raised when a group is created and in
            ``init_rpc``; else None.
    """

    backends: tuple[str, ...] = ()
    ddp: bool = False
    rpc: bool = False
    problem: str | None = None

    def backend(self, named: str) -> str:
        """Return the backend name that replaces a requested name.

        Raises:
            ValueError: ``problem`` is set.
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
    """Parse ``MPIDIST_REPLACE``; return None if the variable is unset or empty. Pure."""
    text = environ.get(VARIABLE, "")
    if not text.strip():
        return None
    # "," is a mistake, not an empty list.
    words = [word.strip().lower() for word in text.split(",") if word.strip()] or [text]
    unknown = [word for word in words if word not in (*BACKENDS, DDP, RPC)]
    problem = None
    if unknown:
        problem = (
            f"{VARIABLE}={text!r} has {', '.join(map(repr, unknown))}, which it does not know; "
            "write a list of "
            f"{', '.join(BACKENDS)}, {DDP} and {RPC}, as {VARIABLE}=gloo,nccl,mpi, or unset it"
        )
    elif "TORCHELASTIC_RUN_ID" in environ:
        size = environ.get("WORLD_SIZE", "N")
        problem = (
            f"{VARIABLE}={text} has MPI carry this script's messages, but torchrun, or a launcher "
            "built on it, started the "
            f"script, and MPI does not know its processes. Start it with 'mpirun -n {size} python "
            f"...' or 'srun -n {size} "
            f"python ...' instead, or unset {VARIABLE}"
        )
    backends = tuple(name for name in BACKENDS if name in words)
    return Replacement(backends, DDP in words, RPC in words, problem)


def install() -> Callable[[str], str]:
    """Patch torch as ``MPIDIST_REPLACE`` requires; without the variable change nothing.

    Returns:
        A function from a requested backend name to its replacement.
    """
    chosen = parse(os.environ)
    if chosen is None:
        return str
    if chosen.problem is None:
        _patch(chosen)
    else:
        rpc_names.refuse(chosen.problem)
    return functools.partial(_in_rank, chosen)


def _in_rank(chosen: Replacement, named: str) -> str:
    # A child process of multiprocessing, such as torch's for asynchronous checkpoints, is no rank
    # and keeps torch's groups.
    return named if multiprocessing.parent_process() is not None else chosen.backend(named)


def _patch(chosen: Replacement) -> None:
    import torch.distributed as dist

    os.environ.update(torch_variables(os.environ, socket.gethostname()))
    for name in ("mpi", "nccl"):
        if name in chosen.backends:
            # distributed_c10d keeps its own function, because it uses ProcessGroupNCCL if True.
            setattr(dist, f"is_{name}_available", _available(getattr(dist, f"is_{name}_available")))
    if "gloo" in chosen.backends:
        generation.replaced_functions()
    if chosen.ddp:
        ddp_name.install()
    if chosen.rpc:
        rpc_names.install()
    _end_with_exceptions()


def _end_with_exceptions() -> None:
    """Let an uncaught exception end the job where a framework has started MPI by mpi4py.

    Lightning does so to find its ranks, before the first group.
    """
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        runtime = importlib.import_module("mpidist.comm.mpi.runtime")
        if multiprocessing.parent_process() is None:
            runtime.end_job_for_uncaught(kind, error)
        previous(kind, error, trace)

    sys.excepthook = excepthook


def _available(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def available() -> bool:
        # These modules of torch then query NCCL's version.
        needs_nccl = (
            sys._getframe(1).f_globals.get("__name__", "").startswith(_ASKING_FOR_NCCL_ITSELF)
        )
        return original() if needs_nccl else True

    return available
