"""torch's collective methods with one tensor for a list, and values for an options object."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpidist.c10d.short_forms import full, in_full

LIMIT = timedelta(seconds=90)


def tensor(rank, count=4):
    return torch.arange(count) + 10.0 * rank


def rows(size, count=4):
    return [torch.zeros(count) for _ in range(size)]


def all_reduces(group, rank, size):
    calls = (
        lambda t: group.allreduce(t),
        lambda t: group.allreduce([t]),
        lambda t: group.allreduce(t, dist.ReduceOp.SUM),
        lambda t: group.allreduce([t], op=dist.ReduceOp.SUM),
        lambda t: group.allreduce(t, dist.ReduceOp.SUM, LIMIT),
        lambda t: group.allreduce([t], c10d.AllreduceOptions()),
    )
    total = sum(tensor(one) for one in range(size))
    # Ranks may use different forms of one call.
    for place in range(len(calls)):
        given = tensor(rank)
        calls[(place + rank) % len(calls)](given).wait()
        yield given, total
    scalar, largest = torch.tensor(3 + rank), tensor(rank)
    group.allreduce(scalar).wait()
    group.allreduce(largest, op=dist.ReduceOp.MAX).wait()
    yield scalar, torch.tensor(3 * size + size * (size - 1) // 2)
    yield largest, tensor(size - 1)


def rooted(group, rank, size):
    root = size - 1
    for call in (
        lambda t: group.broadcast(t, root),
        lambda t: group.broadcast(t, root=root, timeout=LIMIT),
        lambda t: group.broadcast([t], root),
    ):
        given = tensor(rank)
        call(given).wait()
        yield given, tensor(root)
    given = tensor(rank)
    group.broadcast([given]).wait()
    yield given, tensor(0)
    for call in (
        lambda t: group.reduce(t, root, dist.ReduceOp.MAX),
        lambda t: group.reduce(t, root=root, op=dist.ReduceOp.MAX),
    ):
        given = tensor(rank)
        call(given).wait()
        if rank == root:
            yield given, tensor(size - 1)
    gathered = rows(size) if rank == root else []
    group.gather(gathered, tensor(rank), root=root).wait()
    yield from zip(gathered, map(tensor, range(size)), strict=False)
    scattered = torch.zeros(4)
    sent = [tensor(rank) + place for place in range(size)] if rank == root else []
    group.scatter(scattered, sent, root).wait()
    yield scattered, tensor(root) + rank


def others(group, rank, size):
    for call in (
        lambda out: group.allgather(out, tensor(rank)),
        lambda out: group.allgather(out, tensor(rank), timeout=LIMIT),
        lambda out: group.allgather([out], [tensor(rank)]),
    ):
        gathered = rows(size)
        call(gathered).wait()
        yield from zip(gathered, map(tensor, range(size)), strict=True)
    total = sum(tensor(one) + rank for one in range(size))
    for call in (
        lambda out, given: group.reduce_scatter(out, given),
        lambda out, given: group.reduce_scatter(out, given, op=dist.ReduceOp.SUM),
        lambda out, given: group.reduce_scatter([out], [given]),
    ):
        result = torch.zeros(4)
        call(result, [tensor(rank) + place for place in range(size)]).wait()
        yield result, total
    exchanged = torch.zeros(size)
    group.alltoall_base(exchanged, tensor(rank, size), [], [], LIMIT).wait()
    yield exchanged, torch.tensor([10.0 * one + rank for one in range(size)])
    group.barrier(LIMIT).wait()
    group.barrier(timeout=LIMIT).wait()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("cases", [all_reduces, rooted, others])
def test_each_short_form_does_what_its_full_form_does(default_group, cases):
    group = default_group
    for place, (result, expected) in enumerate(cases(group, group.rank(), group.size())):
        assert torch.equal(result, expected), (place, result, expected)


@pytest.mark.mpi(min_size=1)
def test_modes_see_short_forms(default_group):
    group, seen = default_group, []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    one, other = tensor(group.rank()), tensor(group.rank())
    with Seeing():
        group.allreduce(one).wait()
        group.broadcast(other, root=0, timeout=LIMIT).wait()
        group.barrier(timeout=LIMIT).wait()
    assert torch.equal(one, sum(tensor(rank) for rank in range(group.size())))
    assert torch.equal(other, tensor(0))
    names = " ".join(seen)
    assert all(f"c10d.{name}" in names for name in ("allreduce_", "broadcast_", "barrier"))


def test_full_forms_stay_as_they_are():
    tensors, options = ([torch.ones(1)],), c10d.AllreduceOptions()
    assert full("allreduce", tensors, options) == (tensors, options)


@pytest.mark.parametrize(
    ("first", "rest", "named", "words"),
    [
        (c10d.AllreduceOptions(), (), {"op": 1}, "not both"),
        (None, (), {"root": 1}, "'root'"),
        (dist.ReduceOp.SUM, (LIMIT, 1), {}, "op, timeout"),
    ],
)
def test_values_that_a_method_lacks_are_named(first, rest, named, words):
    with pytest.raises(TypeError, match=words):
        full("allreduce", (torch.ones(1),), first, rest, named)


def test_calls_are_given_in_their_full_form():
    tensor = torch.ones(1)
    (tensors, options) = in_full("allreduce", (tensor,), {"op": dist.ReduceOp.MAX})
    assert tensors == [tensor] and options.reduceOp == dist.ReduceOp.MAX
    given = c10d.BroadcastOptions()
    assert in_full("broadcast", ([tensor],), {"opts": given}) == ([tensor], given)
    # Without a short form the arguments stay as they are.
    assert in_full("send", ([tensor], 1), {"tag": 3}) == ([tensor], 1, 3)
