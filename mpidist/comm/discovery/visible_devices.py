"""Devices of a node that every rank of the node sees, compared by UUID.

If each rank of a node sees only its own device (``srun --gpus-per-task=1``), the two ranks of a
trial share one device, but a rank of the job would have to open memory of a device that it does not
see, and MPI may end the job. No trial represents such a job, so its device memory is staged through
host memory.
"""

from __future__ import annotations

import hashlib

import torch

from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.mpi.library import MPI

UNSEEN = (
    "not used: another rank of this node has a device that this process does not see; start the "
    "job so that each rank sees all devices of its node (srun --gpu-bind=none), or set "
    "MPIDIST_CUDA_AWARE=1 if this MPI can"
)
# Each rank of this node sees the devices of all; None: not compared yet.
_node_sees_all: bool | None = None


def _forget() -> None:
    global _node_sees_all
    _node_sees_all = None


runtime.belongs_to_world(_forget)


def are_known_unseen() -> bool:
    """Return whether a comparison has found a device of this node that some rank does not see."""
    return _node_sees_all is False


def may_be_unseen(device: torch.device) -> bool:
    """Return whether some rank of this node may not see all its devices, as far as known here."""
    if _node_sees_all is not None:
        return not _node_sees_all
    return device.type == "cuda" and 0 < torch.cuda.device_count() < runtime.world().local_size


def all_seen(comm: Communicator, device: torch.device) -> bool:
    """Return whether, on every node, each rank of the group sees the devices of all.

    Collective: over ``comm``.
    """
    global _node_sees_all
    own = _device_name(device.index if device.index is not None else torch.cuda.current_device())
    names = bytearray(len(own) * comm.size)
    comm.mpi.Allgather((own, len(own), MPI.BYTE), (names, len(own), MPI.BYTE))
    seen = {_device_name(index) for index in range(torch.cuda.device_count())}
    here = [rank for rank, node in enumerate(comm.nodes) if node == comm.nodes[comm.rank]]
    unseen = [
        rank for rank in here if bytes(names[rank * len(own) : (rank + 1) * len(own)]) not in seen
    ]
    answers = bytearray(comm.size)
    comm.mpi.Allgather((bytes([not unseen]), 1, MPI.BYTE), (answers, 1, MPI.BYTE))
    is_seen = all(answers[rank] for rank in here)
    if not is_seen or len(here) == runtime.world().local_size:
        _node_sees_all = is_seen
    return all(answers)


def _device_name(index: int) -> bytes:
    """Return an identifier of fixed length, unique on the node and independent of the numbering."""
    return hashlib.blake2b(
        str(torch.cuda.get_device_properties(index).uuid).encode(), digest_size=16
    ).digest()
