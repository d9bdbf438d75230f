"""Values of another rank's references, by windows: contenders beside ``to_here`` and an answer.

Rank 1 owns the values, rank 0 wants a copy of its own. A window moves the data, and a call without
a payload is the notice. The owner's functions are called by name, so that both ranks import this
module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from harness import timing
from rpc import workers as rpc_workers

Tensor = torch.Tensor
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
_OWNER = "worker1"


class Held:
    """One size: the owner's value, and a window of both ranks.

    Collective: constructed by both ranks.

    Attributes:
        value: The owner's value, in memory of its own.
        window: The owner's tensor holds the value too; rank 0's receives puts.
    """

    def __init__(self, group: Any, nbytes: int) -> None:
        self.value = torch.arange(nbytes // 4, dtype=torch.float32) + nbytes
        self.window = group.window(size=nbytes // 4, dtype=torch.float32)
        if group.rank == 1:
            self.window.tensor.copy_(self.value)
        group.barrier()


_held: dict[int, Held] = {}


def value_of(nbytes: int) -> Tensor:
    """Return the owner's value."""
    return _held[nbytes].value


def numel_of(nbytes: int) -> int:
    """Return the number of elements of the owner's value."""
    return _held[nbytes].value.numel()


def copy_into_window(nbytes: int) -> None:
    """Copy the owner's value into its window, where rank 0 maps it."""
    held = _held[nbytes]
    held.window.tensor.copy_(held.value)


def put_into_window(nbytes: int) -> None:
    """Put the owner's value into rank 0's memory."""
    held = _held[nbytes]
    held.window.put(held.value, 0)


def measure(
    group: Any, comm: Any, sizes: tuple[int, ...], rounds: int, burst_s: float
) -> list[tuple[str, int, list[timing.Series]]]:
    """Check and time all contenders, on rank 0, while the owner's threads serve.

    Collective: over the group, of two ranks on one node.

    Args:
        comm: mpi4py communicator of this rank alone.

    Returns:
        Operation, size and series; nothing on rank 1.

    Raises:
        RuntimeError: A contender has a wrong result (rank 0).
    """
    for nbytes in sizes:
        _held[nbytes] = Held(group, nbytes)
    rpc = rpc_workers.start("mpidist", group)
    found = []
    if group.rank == 0:
        try:
            for nbytes in sizes:
                contenders = _contenders(rpc, _held[nbytes], nbytes)
                series = timing.time_rounds(comm, contenders, rounds, burst_s)
                found.append(("reference", nbytes, series))
        finally:
            rpc.rpc_sync(_OWNER, rpc_workers.begin, args=("leave",))
    else:
        rpc_workers.follow_phases()
    rpc_workers.end("mpidist", group)
    for nbytes in sizes:
        _held.pop(nbytes).window.tensor_deregister()
    return found


def _contenders(rpc: Any, held: Held, nbytes: int) -> list[timing.Contender]:
    """Return the contenders, checked; each copy has memory that was used before."""
    rref = rpc.remote(_OWNER, value_of, args=(nbytes,))
    own, mapped = held.window.tensor, held.window.map_remote_tensor(1)
    private = torch.zeros_like(own)
    call = partial(rpc.rpc_sync, _OWNER)

    def two_copies() -> Tensor:
        call(copy_into_window, args=(nbytes,))
        return private.copy_(mapped)

    def one_copy() -> Tensor:
        call(rpc_workers.noop)
        return private.copy_(mapped)

    def put() -> Tensor:
        call(put_into_window, args=(nbytes,))
        return own

    def size_then_put() -> Tensor:
        # A caller that does not know the value's size cannot provide memory before.
        numel = call(numel_of, args=(nbytes,))
        return put()[:numel]

    calls = {
        "to_here": rref.to_here,
        "answer": partial(call, value_of, args=(nbytes,)),
        "two copies": two_copies,
        "one copy": one_copy,
        "put by the owner": put,
        "size, then put": size_then_put,
    }
    for name, each in calls.items():
        private.zero_()
        own.zero_()
        if not torch.equal(each(), held.value):
            raise RuntimeError(f"{name} of {nbytes} bytes: wrong result")
    # The floor under all of them.
    calls["no value"] = partial(call, rpc_workers.noop)
    return [timing.Contender(name, (each,), ()) for name, each in calls.items()]
