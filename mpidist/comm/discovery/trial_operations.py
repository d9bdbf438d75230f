"""MPI operations that a trial executes on device memory, each with an exact expected result.

They are the calls that this library makes on device memory, in the same forms: movement in bytes,
reductions in place, receives posted and matched. A message has host memory on one side where the
library's may: users' sender and receiver are independent, and a message or broadcast of an
unexpected length is received in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mpidist.comm.memory import buffer
from mpidist.comm.mpi import backoff, byte_strings
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi

# Raised with each change of the calls or the operands: results of another version are not used.
VERSION = 2
WORKS = "works"
# Elements of each rank's share: an eager message, and 1 MiB, which needs a rendezvous.
_NUMELS = (61, 1 << 18)
_HOST = torch.device("cpu")
_ARITHMETIC = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_FIELD, _INTEGER, _NARROW = tuple(_ARITHMETIC)[:2], tuple(_ARITHMETIC), tuple(_ARITHMETIC)[1:]
# Reductions that MPI does on device memory (``algorithms/device_all_reduce``): for each type, by
# NumPy's name, MPI's datatype and operations. Sums of narrow integers are not MPI's.
REDUCED = {
    "uint8": ("UINT8_T", _NARROW),
    "uint16": ("UINT16_T", _NARROW),
    "uint32": ("UINT32_T", _INTEGER),
    "uint64": ("UINT64_T", _INTEGER),
    "int8": ("INT8_T", _NARROW),
    "int16": ("INT16_T", _NARROW),
    "int32": ("INT32_T", _INTEGER),
    "int64": ("INT64_T", _INTEGER),
    "float32": ("FLOAT", _FIELD),
    "float64": ("DOUBLE", _FIELD),
    "complex64": ("C_FLOAT_COMPLEX", _FIELD),
    "complex128": ("C_DOUBLE_COMPLEX", _FIELD),
}


@dataclass(frozen=True)
class Trial:
    """One operation on one size, as its rank executes it.

    The operand of rank r is ``arange(numel) % 1000 + r``, in fp32.
    """

    mpi: Mpi
    operation: str
    device: torch.device
    numel: int

    def operand(self, rank: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the operand of ``rank``, on the trial's device by default."""
        values = torch.arange(self.numel, device=_HOST) % 1000 + rank
        return values.float().to(device or self.device)

    def result(self, numel: int, device: torch.device | None = None) -> torch.Tensor:
        """Return memory for a result; NaN marks elements that MPI does not write."""
        return torch.full((numel,), torch.nan, device=device or self.device)

    def copied(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return a copy of an array on the trial's device."""
        return torch.from_numpy(values.copy()).to(self.device)

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


Results = list[tuple[torch.Tensor, torch.Tensor]]  # (actual, expected)


def _point_to_point(trial: Trial) -> Results:
    return _messages(trial, trial.device, trial.device)


def _point_to_point_with_host(trial: Trial) -> Results:
    return _messages(trial, trial.device, _HOST) + _messages(trial, _HOST, trial.device)


def _messages(trial: Trial, sender: torch.device, receiver: torch.device) -> Results:
    """Send to the next rank, and receive by each kind of receive."""
    rank, size = trial.mpi.Get_rank(), trial.mpi.Get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, out = trial.operand(rank, sender), trial.result(3 * trial.numel, receiver)
    posted, matched, probed = map(buffer.as_bytes, out.chunk(3))
    trial.synchronize()
    send = partial(trial.mpi.Isend, buffer.as_bytes(mine), right)
    # The ring and payloads of calls: posted before or after the message arrives, waited for as a
    # whole.
    requests = [trial.mpi.Irecv(posted, left, 1), send(1)]
    MPI.Request.Waitall(requests)
    # Collectives that exchange tensors: matched, then received by a blocking call.
    outgoing = send(2)
    trial.mpi.Mprobe(left, 2).Recv(matched)
    outgoing.Wait()
    # Users' messages: never waited for within MPI.
    outgoing, found = send(3), []

    def is_matched() -> bool:
        message = trial.mpi.Improbe(left, 3)
        if message is not None:
            found.append(message)
        return message is not None

    backoff.until(is_matched)
    backoff.until(found[0].Irecv(probed).Test)
    backoff.until(outgoing.Test)
    return [(out, trial.operand(left, receiver).repeat(3))]


def _bcast(trial: Trial) -> Results:
    rank = trial.mpi.Get_rank()
    data = trial.operand(rank)
    trial.call(buffer.as_bytes(data), 0)
    # Ranks whose tensor has another length than the root's receive it in host memory.
    other = trial.operand(rank, trial.device if rank == 0 else _HOST)
    trial.call(buffer.as_bytes(other), 0)
    return [(data, trial.operand(0)), (other, trial.operand(0, other.device))]


def _allgather(trial: Trial) -> Results:
    # Once from separate memory, once in place; mpi4py counts one block.
    rank, size = trial.mpi.Get_rank(), trial.mpi.Get_size()
    mine, out, held = (
        trial.operand(rank),
        trial.result(size * trial.numel),
        trial.result(size * trial.numel),
    )
    held.chunk(size)[rank].copy_(mine)
    trial.call(buffer.as_bytes(mine), _ragged(out, mine.nbytes))
    trial.call(MPI.IN_PLACE, _ragged(held, mine.nbytes))
    expected = torch.cat([trial.operand(peer) for peer in range(size)])
    return [(out, expected), (held, expected)]


def _alltoallv(trial: Trial) -> Results:
    # Rank p receives the first elements of each operand, p fewer than all.
    rank, size = trial.mpi.Get_rank(), trial.mpi.Get_size()
    mine, length = trial.operand(rank), trial.numel - rank
    out = trial.result(size * length)
    itemsize = mine.element_size()
    shares = [(trial.numel - peer) * itemsize for peer in range(size)]
    starts = [length * itemsize * peer for peer in range(size)]
    trial.call(
        _ragged(mine, (shares, [0] * size)), _ragged(out, ([length * itemsize] * size, starts))
    )
    return [(out, torch.cat([trial.operand(peer)[:length] for peer in range(size)]))]


def _allreduce(trial: Trial) -> Results:
    results: Results = []
    for name, (datatype, operations) in REDUCED.items():
        # Small numbers, whose products over a few ranks are exact in every type.
        parts = np.stack(
            [
                (np.arange(trial.numel) + rank) % 3 + (rank < 2)
                for rank in range(trial.mpi.Get_size())
            ]
        ).astype(name)
        for operation in operations:
            mine = trial.copied(parts[trial.mpi.Get_rank()])
            message = buffer.elements(mine, 0, mine.numel(), getattr(MPI, datatype))
            trial.call(MPI.IN_PLACE, message, getattr(MPI, operation))
            expected = _ARITHMETIC[operation].reduce(parts, dtype=parts.dtype)
            results.append((mine, trial.copied(expected)))
    return results


# The non-blocking form of a collective is tried separately, because it replaces the blocking one
# for waits with back-off. Reductions have none here: under Open MPI a non-blocking reduction on
# device memory crashes.
_TRIALS: dict[str, Callable[[Trial], Results]] = {
    "point_to_point": _point_to_point,
    "point_to_point_with_host": _point_to_point_with_host,
    "Bcast": _bcast,
    "Ibcast": _bcast,
    "Allgather": _allgather,
    "Iallgather": _allgather,
    "Alltoallv": _alltoallv,
    "Ialltoallv": _alltoallv,
    "Allreduce": _allreduce,
}
OPERATIONS = tuple(_TRIALS)
REDUCTIONS = frozenset({"Allreduce"})


def attempt(mpi: Mpi, operation: str, device: torch.device) -> str:
    """Execute one operation on memory of a device, with two sizes, and check the results.

    Collective: over ``mpi``. May end the process.

    Args:
        operation: A name in ``OPERATIONS``.

    Returns:
        ``WORKS``, or the error and its rank; the same on all ranks.
    """
    wrong = ""
    for numel in _NUMELS:
        for result, expected in _TRIALS[operation](Trial(mpi, operation, device, numel)):
            # As bytes, because torch does not compare every dtype on every device.
            if not torch.equal(result.view(torch.uint8), expected.view(torch.uint8)):
                wrong = wrong or (
                    f"wrong result on rank {mpi.Get_rank()} with {numel} elements of {result.dtype}"
                )
    verdicts = [
        text.decode(errors="replace") for text in byte_strings.gathered(mpi, wrong.encode())
    ]
    return next(filter(None, verdicts), WORKS)


def _ragged(tensor: torch.Tensor, counts: Any) -> tuple[MPI.buffer, Any, MPI.Datatype]:
    return buffer.memory(tensor.data_ptr(), tensor.nbytes), counts, MPI.BYTE
