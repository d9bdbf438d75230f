"""Sums in the order of the ranks: one result on any nodes, at any size, by any call."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from mpidist import ddp
from mpidist.comm import AVG, MAX, PRODUCT, SUM, PremulSum
from mpidist.comm.algorithms import rank_order, reduce_op, shared_memory
from mpidist.comm.mpi import runtime
from mpidist.errors import MpidistError
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree, finished, raises_on_all

pytestmark = pytest.mark.mpi

KINDS = [
    (torch.float32, SUM), (torch.float32, AVG), (torch.float64, SUM), (torch.float16, SUM),
    (torch.bfloat16, AVG), (torch.complex64, SUM), (torch.float32, PRODUCT),
]  # fmt: skip
# Gathered; reduced by shards; the last by shards of several chunks.
SIZES = (1, 257, 20_000)
LONG = 1_100_003


def contribution(rank, numel, dtype):
    """Return values whose sums depend on the order of the additions."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)).to(dtype)


def in_order(parts, op):
    """Return ((r0 + r1) + r2) + ..., in the width of the sums, rounded once."""
    dtype = parts[0].dtype
    total = parts[0].to(reduce_op.ACCUMULATES_IN.get(dtype, dtype))
    for part in parts[1:]:
        total = total * part if op == PRODUCT else total + part.to(total.dtype)
    return (total / len(parts) if op == AVG else total).to(dtype)


@pytest.fixture
def ordered(world, monkeypatch):
    """Return a function that makes groups that add in rank order, on a layout's nodes."""
    now = runtime.world()
    with groups(world, monkeypatch) as clone:

        def make(layout, is_ordered=True):
            changed = dataclasses.replace(now, adds_in_rank_order=is_ordered)
            monkeypatch.setattr(runtime, "_world", changed)
            return clone(layout)

        yield make


def is_same(a, b):
    return a.view(torch.uint8).equal(b.view(torch.uint8))


def test_the_values_show_the_order(world):
    parts = [contribution(rank, 40_000, torch.float32) for rank in range(3)]
    assert not is_same(in_order(parts, SUM), in_order(parts[::-1], SUM))


@pytest.mark.parametrize("layout", ["one node", "blocks", "cyclic", "alone"])
def test_an_all_reduce_has_the_bits_of_rank_order(world, ordered, layout):
    group, wrong = ordered(layout), []
    cases = [(*kind, numel) for kind in KINDS for numel in SIZES]
    for dtype, op, numel in (*cases, (torch.float32, SUM, LONG)):
        parts = [contribution(rank, numel, dtype) for rank in range(group.size)]
        wanted = in_order(parts, op)
        tensor = torch.empty(numel, dtype=dtype)
        # The second call of an address is a prepared one.
        for asynchronous in (False, False, True):
            tensor.copy_(parts[group.rank])
            finished(group.all_reduce(tensor, op, async_op=asynchronous))
            if not is_same(tensor, wanted):
                wrong.append((dtype, op, numel, asynchronous))
    agree(world, not wrong, f"{layout}: {wrong}")


@pytest.mark.parametrize("layout", ["one node", "blocks"])
def test_other_reductions_have_the_same_bits(world, ordered, layout):
    group, wrong = ordered(layout), []
    size = group.size
    for dtype, op in KINDS:
        parts = [contribution(rank, 30_000 * size, dtype) for rank in range(size)]
        wanted = in_order(parts, op)
        rooted = parts[group.rank].clone()
        group.reduce(rooted, size - 1, op)
        if not is_same(rooted, wanted if group.rank == size - 1 else parts[group.rank]):
            wrong.append(("reduce", dtype, op))
        own = torch.empty(30_000, dtype=dtype)
        group.reduce_scatter_tensor(own, parts[group.rank], op)
        if not is_same(own, wanted.view(size, -1)[group.rank]):
            wrong.append(("reduce_scatter_tensor", dtype, op))
        small = [part[:7].clone() for part in parts]
        group.all_reduce_coalesced([small[group.rank]], op)
        if not is_same(small[group.rank], in_order([part[:7] for part in parts], op)):
            wrong.append(("all_reduce_coalesced", dtype, op))
    agree(world, not wrong, f"{layout}: {wrong}")


def test_a_factor_is_applied_before_the_sum_is_rounded(world, ordered):
    group, wrong = ordered("blocks"), []
    for dtype, numel in itertools.product((torch.float32, torch.bfloat16), (300, 30_000)):
        wide = reduce_op.ACCUMULATES_IN.get(dtype, dtype)
        parts = [contribution(rank, numel, dtype) for rank in range(group.size)]
        wanted = in_order([part.to(wide) * (rank + 0.5) for rank, part in enumerate(parts)], SUM)
        factor = PremulSum(group.rank + 0.5)
        everywhere, rooted = (parts[group.rank].clone() for _ in range(2))
        group.all_reduce(everywhere, factor)
        group.reduce(rooted, 0, factor)
        if not is_same(everywhere, wanted.to(dtype)):
            wrong.append(("all_reduce", dtype))
        if group.rank == 0 and not is_same(rooted, wanted.to(dtype)):
            wrong.append(("reduce", dtype))
    agree(world, not wrong, str(wrong))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_averages_in_node_memory_have_the_bits_of_the_all_reduce(world, ordered, dtype):
    group = ordered("one node")
    parts = [contribution(rank, 300_001, dtype) for rank in range(group.size)]
    memory = shared_memory.share(group, parts[0].nbytes)
    agree(world, memory is not None, "no memory was shared")
    own = memory.tensor(0, parts[0].numel(), dtype)
    own.own.copy_(parts[group.rank])
    own.average()
    agree(world, is_same(own.own, in_order(parts, AVG)))


def test_a_device_adds_in_rank_order(place, world, ordered):
    group, wrong = ordered("one node"), []
    for dtype, op in KINDS:
        for numel in (1, 5, 1000 * group.size):
            parts = [contribution(rank, numel, dtype) for rank in range(group.size)]
            tensor = place.produce(parts[group.rank])
            group.all_reduce(tensor, op)
            if not is_same(place.consume(tensor.clone), in_order(parts, op)):
                wrong.append(("all_reduce", dtype, op, numel))
        own = place.produce(torch.zeros(1000, dtype=dtype))
        group.reduce_scatter_tensor(own, place.produce(parts[group.rank]), op)
        if not is_same(
            place.consume(own.clone), in_order(parts, op).view(group.size, -1)[group.rank]
        ):
            wrong.append(("reduce_scatter_tensor", dtype, op))
    agree(world, not wrong, str(wrong))


def test_what_has_one_result_in_any_order_keeps_its_algorithm(world, ordered):
    group = ordered("one node")
    comm = group._comm
    for dtype, op, is_ordered in [
        (torch.float32, SUM, True), (torch.bfloat16, AVG, True), (torch.complex64, SUM, True),
        (torch.float32, MAX, False), (torch.int32, SUM, False), (torch.bool, SUM, False),
    ]:  # fmt: skip
        found = rank_order.applies(comm, dtype, reduce_op.reduction(dtype, op))
        assert found is (is_ordered and group.size > 2)


@pytest.mark.mpi(min_size=3)
def test_tensors_of_other_lengths_are_refused(world, ordered):
    group = ordered("one node")
    # By shards; a gather of other lengths is one call of MPI, which decides what it notices.
    numel = 100_000 + 10 * (group.rank == 0)
    raises_on_all(world, MpidistError, lambda: group.all_reduce(torch.ones(numel)), "bytes")


@pytest.mark.mpi(min_size=3)
def test_weights_are_equal_on_any_nodes_and_are_not_without_the_order(world, ordered):
    """Steps of a model on three layouts of nodes."""
    digests = {}
    for is_ordered in (True, False):
        for layout in ("one node", "cyclic", "uneven"):
            group = ordered(layout, is_ordered)
            torch.manual_seed(0)
            model = torch.nn.Linear(50, 50)
            wrapped = ddp.DistributedDataParallel(model, process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            inputs = torch.randn(3, 8, 50, generator=torch.Generator().manual_seed(world.rank))
            for batch in inputs:
                wrapped(batch).pow(3).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            digests[is_ordered, layout] = model.weight.detach().numpy().tobytes()
    of_order = {digest for (is_ordered, _), digest in digests.items() if is_ordered}
    plain = {digest for (is_ordered, _), digest in digests.items() if not is_ordered}
    agree(world, len(of_order) == 1 and len(plain) > 1, f"{len(of_order)}, {len(plain)}")
