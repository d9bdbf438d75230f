"""Work on any number of items: what is timed, and the check of its result.

All ranks build and run a case; rank 0 calls rank 1 in those of RPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import mpidist.rpc
from mpidist.ddp import DistributedDataParallel
from mpidist.zero.optimizer import OSS
from rpc import workers as rpc_workers

_TAG = 7
_NUMEL = 4


@dataclass(frozen=True)
class Work:
    """Work on a fixed number of items.

    Attributes:
        run: Does the work once; what it returns is held until the check, outside the time.
        check: Raises for a wrong result.
    """

    run: Callable[[], Any]
    check: Callable[[Any], None]


@dataclass(frozen=True)
class Case:
    """Work whose cost for each item should not depend on their number.

    Attributes:
        name: Name in tables.
        make: ``make(group, items)`` prepares the work. Collective: over the group.
        uses_rpc: The workers of RPC have to run.
        most: Largest number of items that is measured.
    """

    name: str
    make: Callable[[Any, int], Work]
    uses_rpc: bool = False
    most: int = 100_000


def posted_receives(group: Any, items: int) -> Work:
    """Receives of as many tags; the messages come in the reverse order. Ranks above 1 rest.

    MPI itself searches the receives posted to a communicator one by one.
    """
    memory = [torch.zeros(1) for _ in range(items if group.rank == 1 else 0)]
    out, ready = torch.ones(1), torch.zeros(1)

    def run() -> None:
        if group.rank == 0:
            group.recv(ready, 1)
            works = [group.isend(out, 1, _TAG + tag) for tag in reversed(range(items))]
        elif group.rank == 1:
            works = [group.irecv(place, 0, _TAG + tag) for tag, place in enumerate(memory)]
            group.send(ready, 0)
        else:
            works = []
        for work in works:
            work.wait()

    def check(held: Any) -> None:
        _require(all(float(place) == 1.0 for place in memory), "a message has not come")
        for place in memory:
            place.zero_()

    return Work(run, check)


def queued_all_reduces(group: Any, items: int) -> Work:
    """All-reduces of one element that are all queued before the first is waited for."""
    tensors = [torch.ones(1) for _ in range(items)]

    def run() -> None:
        for work in [group.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def check(held: Any) -> None:
        _require(all(float(tensor) == group.size for tensor in tensors), "a sum is wrong")
        for tensor in tensors:
            tensor.fill_(1.0)

    return Work(run, check)


def outstanding_calls(group: Any, items: int) -> Work:
    """Calls of one function that are all sent before the first is waited for."""
    count = 0 if group.rank else items

    def run() -> list[Any]:
        futures = [
            mpidist.rpc.rpc_async("worker1", rpc_workers.one, timeout=0) for _ in range(count)
        ]
        return [future.wait() for future in futures]

    return Work(run, lambda held: _require(held == [1] * count, "a call has a wrong result"))


def held_references(group: Any, items: int) -> Work:
    """Calls of ``remote`` whose references are all held."""
    count = 0 if group.rank else items

    def run() -> list[Any]:
        return [mpidist.rpc.remote("worker1", rpc_workers.one, timeout=0) for _ in range(count)]

    def check(references: list[Any]) -> None:
        last = references[-1:]
        _require([one.to_here(timeout=0) for one in last] == [1] * len(last), "a value is wrong")

    return Work(run, check)


def gradients_of_a_step(group: Any, items: int) -> Work:
    """One backward pass of our DistributedDataParallel over small parameters."""
    parameters = _parameters(items)
    net = _Sum(parameters)
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.25)

    def run() -> None:
        net.zero_grad(set_to_none=False)
        wrapped(torch.ones(())).backward()

    def check(held: Any) -> None:
        _require(all(bool((each.grad == 1).all()) for each in parameters), "a gradient is wrong")

    return Work(run, check)


def sharded_step(group: Any, items: int) -> Work:
    """One step of OSS with Adam over small parameters."""
    parameters, optimizer = _stepped(group, items)
    before = float(parameters[0].detach()[0])

    def check(held: Any) -> None:
        values = torch.stack([each.detach() for each in parameters])
        _require(bool((values == values[0, 0]).all()), "parameters of one gradient differ")
        _require(float(values[0, 0]) < before, "the step has changed nothing")

    return Work(lambda: optimizer.step(), check)


def consolidation(group: Any, items: int) -> Work:
    """The consolidation of OSS's state of small parameters at rank 0."""
    _, optimizer = _stepped(group, items)

    def check(held: Any) -> None:
        if group.rank == 0:
            state = optimizer.state_dict()["state"]
            _require(
                len(state) == items and all(len(values) == 3 for values in state.values()),
                "the consolidated state is wrong",
            )

    return Work(lambda: optimizer.consolidate_state_dict(0), check)


CASES = (
    Case("posted receives", posted_receives, most=10_000),
    Case("queued all-reduces", queued_all_reduces),
    Case("outstanding calls", outstanding_calls, uses_rpc=True),
    Case("held references", held_references, uses_rpc=True),
    Case("gradients of a step", gradients_of_a_step),
    Case("sharded step", sharded_step),
    Case("consolidation", consolidation),
)


class _Sum(torch.nn.Module):
    """Module whose gradient is 1 for each element of its parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = torch.cat(list(self.all)).sum()
        return total * x


def _parameters(items: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(_NUMEL)) for _ in range(items)]


def _stepped(group: Any, items: int) -> tuple[list[torch.nn.Parameter], OSS]:
    """Return parameters of equal gradients, and an optimizer that has stepped once."""
    parameters = _parameters(items)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = OSS(parameters, torch.optim.Adam, group, lr=1e-3)
    optimizer.step()
    return parameters, optimizer


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise RuntimeError(what)
