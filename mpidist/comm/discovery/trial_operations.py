"""MPI operations that a trial executes on device memory, each with an exact expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi import byte_strings
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi, MpiCalls

WORKS = "works"
# Elements of each rank's share: an eager message, and 1 MiB, which needs a rendezvous.
_NUMELS = (61, 1 << 18)


@dataclass(frozen=True)
class Trial:
    """One operation on one size, as its rank executes it.

    The operand of rank r is ``arange(numel) % 1000 + r``, so sums are exact.
    """

    mpi: Mpi
    operation: str
    device: torch.device
    numel: int

    def operand(self, rank: int) -> torch.Tensor:
        """Return the operand of ``rank``."""
        return (torch.arange(self.numel, device=self.device) % 1000 + rank).float()

    def result(self, numel: int) -> torch.Tensor:
        """Return memory for a result; NaN marks elements that MPI does not write."""
        return torch.full((numel,), torch.nan, device=self.device)

    def call(self, *args: object) -> None:
        """Call MPI's operation and wait until it is complete."""
        self.synchronize()
        request = getattr(self.mpi, self.operation)(*args)
        if request is not None:
            request.Wait()

    def synchronize(self) -> None:
        """Wait until torch has written the operands, because MPI does not know torch's stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


Result = tuple[torch.Tensor, torch.Tensor]  # (actual, expected)


def _point_to_point(trial: Trial) -> Result:
    rank, size = trial.mpi.Get_rank(), trial.mpi.Get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    out, mine = trial.result(2 * trial.numel), trial.operand(rank)
    first, second = out.chunk(2)
    trial.synchronize()
    incoming = trial.mpi.Irecv(_floats(first), left, 1)
    trial.mpi.Isend(_floats(mine), right, 1).Wait()
    incoming.Wait()
    trial.mpi.Sendrecv(_floats(mine), right, 2, _floats(second), left, 2)
    return out, trial.operand(left).repeat(2)


def _bcast(trial: Trial) -> Result:
    data = trial.operand(trial.mpi.Get_rank())
    trial.call(_floats(data), 0)
    return data, trial.operand(0)


def _allgather(trial: Trial) -> Result:
    # Once from separate memory, once in place; mpi4py counts one block.
    rank, size = trial.mpi.Get_rank(), trial.mpi.Get_size()
    mine, out, held = (
        trial.operand(rank),
        trial.result(size * trial.numel),
        trial.result(size * trial.numel),
    )
    held.chunk(size)[rank].copy_(mine)
    trial.call(_floats(mine), _floats(out, trial.numel))
    trial.call(MPI.IN_PLACE, _floats(held, trial.numel))
    return torch.cat([out, held]), torch.cat([trial.operand(peer) for peer in range(size)]).repeat(
        2
    )


def _alltoallv(trial: Trial) -> Result:
    # Rank p receives the first elements of each operand, p fewer than all.
    rank, size = trial.mpi.Get_rank(), trial.mpi.Get_size()
    mine, length = trial.operand(rank), trial.numel - rank
    out = trial.result(size * length)
    shares = [trial.numel - peer for peer in range(size)]
    starts = [length * peer for peer in range(size)]
    trial.call(_floats(mine, (shares, [0] * size)), _floats(out, ([length] * size, starts)))
    return out, torch.cat([trial.operand(peer)[:length] for peer in range(size)])


def _allreduce(trial: Trial) -> Result:
    mine, out = trial.operand(trial.mpi.Get_rank()), trial.result(trial.numel)
    trial.call(_floats(mine), _floats(out), MPI.SUM)
    trial.call(MPI.IN_PLACE, _floats(mine), MPI.SUM)
    return torch.cat([out, mine]), _sum(trial).repeat(2)


def _reduce_scatter_block(trial: Trial) -> Result:
    mine, out = (
        trial.operand(trial.mpi.Get_rank()).repeat(trial.mpi.Get_size()),
        trial.result(trial.numel),
    )
    trial.call(_floats(mine, trial.numel), _floats(out), MPI.SUM)
    return out, _sum(trial)


# The non-blocking form of a collective is tried separately, because it replaces the blocking one
# for waits with back-off and for libraries that admit one thread at a time. Reductions have none
# here: under Open MPI a non-blocking reduction on device memory crashes.
_TRIALS: dict[str, Callable[[Trial], Result]] = {
    "point_to_point": _point_to_point,
    "Bcast": _bcast,
    "Ibcast": _bcast,
    "Allgather": _allgather,
    "Iallgather": _allgather,
    "Alltoallv": _alltoallv,
    "Ialltoallv": _alltoallv,
    "Allreduce": _allreduce,
    "Reduce_scatter_block": _reduce_scatter_block,
}
OPERATIONS = tuple(_TRIALS)
REDUCTIONS = frozenset({"Allreduce", "Reduce_scatter_block"})


def attempt(mpi: Mpi, operation: str, device: torch.device) -> str:
    """Execute one operation on memory of a device, with two sizes, and check the results.

    Collective: over ``mpi``. May end the process.

    Args:
        operation: A name in ``OPERATIONS``.

    Returns:
        ``WORKS``, or the error and its rank; the same on all ranks.
    """
    if operation in REDUCTIONS and isinstance(mpi, MpiCalls):
        return "MPI admits one thread at a time, so it would become a non-blocking reduction"
    wrong = ""
    for numel in _NUMELS:
        result, expected = _TRIALS[operation](Trial(mpi, operation, device, numel))
        if not torch.equal(result, expected):
            wrong = wrong or f"wrong result on rank {mpi.Get_rank()} with {numel} elements"
    verdicts = [
        text.decode(errors="replace") for text in byte_strings.gathered(mpi, wrong.encode())
    ]
    return next(filter(None, verdicts), WORKS)


def _floats(tensor: torch.Tensor, counts: Any = None) -> list[Any]:
    return [
        buffer.memory(tensor.data_ptr(), tensor.nbytes),
        tensor.numel() if counts is None else counts,
        MPI.FLOAT,
    ]


def _sum(trial: Trial) -> torch.Tensor:
    return torch.stack([trial.operand(rank) for rank in range(trial.mpi.Get_size())]).sum(0)
