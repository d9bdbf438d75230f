"""torch.distributed.send and recv on the native group's direct messages."""

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpidist.comm.messages import direct_messages, p2p
from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("default_group")]


def around_the_ring(group, out, into, tag=0):
    """Send to the right and receive from the left, in global ranks; return the sender."""
    ranks = dist.get_process_group_ranks(group)
    mine = ranks.index(dist.get_rank())
    right, left = ranks[(mine + 1) % len(ranks)], ranks[mine - 1]
    if mine:
        dist.send(out, right, group, tag)
        return dist.recv(into, left, group, tag) == left
    source = dist.recv(into, left, group, tag)
    dist.send(out, right, group, tag)
    return source == left


def test_plain_tensors_need_no_handle(world, monkeypatch):
    monkeypatch.setattr(direct_messages, "_SPIN_S", 60.0)
    monkeypatch.setattr(p2p, "RequestWork", None)
    backwards = dist.new_group(list(range(world.size))[::-1])
    ok = True
    for group in (dist.group.WORLD, backwards):
        into = torch.zeros(3)
        ok &= around_the_ring(group, torch.full((3,), float(world.rank)), into)
        ranks = dist.get_process_group_ranks(group)
        ok &= bool((into == ranks[ranks.index(world.rank) - 1]).all())
    dist.destroy_process_group(backwards)
    agree(world, ok)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 2).t(),
        lambda: torch.zeros(8, requires_grad=True),
        lambda: torch.nn.Parameter(torch.zeros(8)),
        lambda: torch.zeros(8, dtype=torch.complex64),
    ],
    ids=["strided", "leaf", "parameter", "complex"],
)
def test_other_tensors_arrive_as_well(world, make):
    out, into = make(), make()
    with torch.no_grad():
        out.copy_(torch.arange(8.0).view(out.shape) + world.rank)
    ok = around_the_ring(dist.group.WORLD, out, into)
    left = (world.rank - 1) % world.size
    with torch.no_grad():
        expected = torch.arange(8.0).view(out.shape) + left
        agree(world, ok and bool((into == expected).all()), f"{into}")


def test_modes_see_the_calls(world):
    seen = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    into = torch.zeros(2)
    with Operators():
        ok = around_the_ring(dist.group.WORLD, torch.ones(2), into)
    ok &= {"c10d::send", "c10d::recv_"} <= set(seen)
    with Functions():
        ok &= around_the_ring(dist.group.WORLD, torch.ones(2), into)
    agree(world, ok and {"send", "recv"} <= set(seen), f"{seen}")


def test_wrong_arguments_reach_torch(world):
    """Its errors, and no message."""
    x = torch.zeros(1)
    for error, call in (
        (ValueError, lambda: dist.send(x, world.rank)),
        (TypeError, lambda: dist.send([x], (world.rank + 1) % world.size)),
        (ValueError, lambda: dist.send(x, world.size)),
        (ValueError, lambda: dist.recv(x, world.size)),
        (ValueError, lambda: dist.send(x, 0, None, 0, 0)),
    ):
        raises_on_all(world, error, call)


def test_another_backend_keeps_torchs_functions(world):
    group = dist.new_group(list(range(world.size)), backend="gloo")
    into = torch.zeros(2)
    ok = around_the_ring(group, torch.full((2,), float(world.rank)), into, 3)
    dist.destroy_process_group(group)
    agree(world, ok and bool((into == (world.rank - 1) % world.size).all()))
