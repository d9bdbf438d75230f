"""Shards on several nodes, groups and modes of torch: equal bits to the plain optimizer."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm import shard_memory
from mpidist.comm.mpi import runtime
from mpidist.comm.mpi.world import number_alike
from mpidist.kernels.view import laid_out
from mpidist.zero.optimizer import OSS
from mpidist.zero.shards.flat_buffers import in_memory_order
from mpidist.zero.shards.half_wire import wire_of
from mpidist.zero.shards.shards import Shards
from tests.tools.support import agree
from tests.zero import nets

pytestmark = pytest.mark.mpi

LAYOUTS = {
    "blocks": lambda rank, size: rank * 2 // size,
    "cyclic": lambda rank, size: rank % 2,
    "uneven": lambda rank, size: int(rank > 0),
}


def both(
    group,
    kind="greedy",
    name="AdamW",
    events=True,
    steps=nets.STEPS,
    seed_of=lambda: None,
    **chosen,
):
    """Train a sharded and a plain optimizer; return where they differ, and the sharded one."""
    optim, settings = nets.OPTIMIZERS[name]
    parameters = nets.parameters_for(name)
    plain = optim(parameters, **settings)
    nets.train(plain, parameters, steps, events)
    parameters = nets.parameters_for(name)
    sharded = OSS(parameters, optim, group, partition=kind, **chosen, **settings)
    nets.train(sharded, parameters, steps, events)
    return nets.differences(sharded, plain), sharded


@pytest.fixture
def nodes(world, monkeypatch):
    """Make groups whose ranks are on simulated nodes."""
    made = []

    def make(layout, **options):
        numbers = [LAYOUTS[layout](rank, world.size) for rank in range(world.size)]
        monkeypatch.setattr(
            runtime.World,
            "nodes_of",
            lambda self, ranks: number_alike(numbers[r] for r in ranks),
        )
        made.append(world.clone(layout, **options))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.mark.parametrize("one_copy", [False, True], ids=["copies", "one copy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_several_nodes(world, nodes, layout, one_copy):
    group = nodes(layout)
    for kind in ("balanced", "flat"):
        wrong, sharded = both(group, kind, one_copy=one_copy)
        agree(world, not wrong, f"{kind}: {wrong}")
        is_shared = group.size > 1 and (group.is_single_node or group._comm.shares_nodes)
        agree(world, sharded._shards.is_one_copy == (one_copy and is_shared))
        group.barrier()


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_memory_that_can_be_shared_at_first_and_not_later(group, monkeypatch, kind):
    """Some parameters are in the node's one copy, the others in each rank's own memory."""
    optim, settings = nets.OPTIMIZERS["AdamW"]
    parameters = nets.parameters_for("AdamW")
    plain = optim(parameters, **settings)
    nets.train(plain, parameters)
    parameters = nets.parameters_for("AdamW")
    sharded = OSS(parameters, optim, group, partition=kind, one_copy=True, **settings)
    monkeypatch.setattr(shard_memory, "shared_maps", lambda comm, sizes: None)
    nets.train(sharded, parameters)
    wrong = nets.differences(sharded, plain)
    agree(group, not wrong, wrong)


def test_in_groups_that_can_be_left_and_that_compare_before_each_call(world, nodes, monkeypatch):
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    for one_copy in (False, True):
        group = nodes("blocks", on_timeout="raise")
        wrong, _ = both(group, "flat", one_copy=one_copy)
        agree(world, not wrong, wrong)
    monkeypatch.undo()
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    group = world.clone("compared", on_timeout="raise")
    for one_copy in (False, True):
        wrong, _ = both(group, one_copy=one_copy)
        agree(world, not wrong, wrong)
    group.close()


@pytest.mark.parametrize("way", nets.WAYS)
def test_under_other_defaults(group, way):
    """The user's default device and dtype have no effect."""
    optim, settings = nets.OPTIMIZERS["Adam-fused"]
    before = torch.get_default_dtype()
    parameters, others = (
        nets.matrices(),
        [torch.nn.Parameter(p.detach().clone()) for p in nets.late()],
    )
    with torch.no_grad():
        for parameter in parameters:
            group.broadcast(parameter, 0)
    plain_parameters = [torch.nn.Parameter(p.detach().clone()) for p in (*parameters, *others)]
    plain = optim(plain_parameters, **settings)
    nets.give_gradients(plain_parameters, 0)
    gradients = [p.grad.clone() for p in plain_parameters]
    plain.step()
    plain.step()
    try:
        torch.set_default_dtype(torch.float64)
        with nets.memory(way) as chosen, torch.device("meta"):
            sharded = OSS(parameters, optim, group, **chosen, **settings)
            sharded.add_param_group({"params": others})
            for parameter, gradient in zip(nets.all_parameters(sharded), gradients, strict=True):
                parameter.grad = gradient
            sharded.clip_grad_norm(1e9)
            sharded.step()
            others[0].requires_grad_(False)
            sharded.refresh_trainable()
            others[0].requires_grad_(True)
            sharded.refresh_trainable()
            sharded.step()
            sharded.consolidate_state_dict()
    finally:
        torch.set_default_dtype(before)
    own = nets.all_parameters(sharded)
    agree(
        group,
        all(
            nets.same_bits(a.detach(), b.detach())
            for a, b in zip(own, plain_parameters, strict=True)
        ),
    )


@pytest.mark.parametrize("way", nets.WAYS)
@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_built_and_stepped_in_inference_mode(group, kind, way):
    """Tensors made in inference mode must be usable outside."""
    optim, settings = nets.OPTIMIZERS["AdamW"]
    parameters, others = nets.matrices(), []
    for parameter in parameters:
        group.broadcast(parameter.data, 0)
        others.append(torch.nn.Parameter(parameter.detach().clone()))
    plain = optim([{"params": others[:3]}, {"params": others[3:], "lr": 0.2}], **settings)
    for place in range(4):
        nets.give_gradients(others, place)
        plain.step()
    with nets.memory(way) as chosen:
        with torch.inference_mode():
            sharded = OSS(parameters[:3], optim, group, partition=kind, **chosen, **settings)
            sharded.add_param_group({"params": parameters[3:], "lr": 0.2})
            for trains in (False, True):
                parameters[0].requires_grad_(trains)
                sharded.refresh_trainable()
                agree(group, not any(parameter.is_inference() for parameter in parameters))
        for place in range(4):
            nets.give_gradients(parameters, place)
            with torch.inference_mode(place % 2 == 0):
                sharded.step()
        wrong = nets.differences(sharded, plain)
    agree(group, not wrong, wrong)


def test_two_optimizers_of_one_group_and_one_over_part_of_it(group):
    half = group.split(group.rank % 2)
    first, second = nets.matrices(), nets.late()
    with torch.no_grad():
        for parameter in first:
            group.broadcast(parameter, 0)
    sharded = [
        OSS(first[:3], torch.optim.Adam, group, partition="flat", lr=0.1),
        OSS(first[3:], torch.optim.SGD, group, lr=0.1, momentum=0.9, one_copy=True),
    ]
    apart = OSS(second, torch.optim.Adam, half, lr=0.1 * (1 + group.rank % 2))
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in (*first, *second)]
    plain = [
        torch.optim.Adam(copies[:3], lr=0.1),
        torch.optim.SGD(copies[3:5], lr=0.1, momentum=0.9),
        torch.optim.Adam(copies[5:], lr=0.1 * (1 + group.rank % 2)),
    ]
    for step in range(6):
        for optimizer in (*sharded, *plain[:2]):
            nets.give_gradients(nets.all_parameters(optimizer), step)
            optimizer.step()
        if group.rank % 2 == 0 or step % 2:  # the halves take different numbers of steps
            for optimizer in (apart, plain[2]):
                nets.give_gradients(nets.all_parameters(optimizer), step)
                optimizer.step()
    wrong = [
        nets.differences(own, other) for own, other in zip((*sharded, apart), plain, strict=True)
    ]
    agree(group, not any(wrong), str(wrong))
    half.close()


@pytest.mark.parametrize("kind", ["greedy", "flat"])
def test_masters_stay_exact_where_nobody_has_written_the_parameter(group, kind):
    """Parameters have rounded values of the wire; no master may be renewed from them."""
    torch.manual_seed(3)
    shapes = [(40, 9), (130,), (6, 5, 3, 3), (7,)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    parameters[2].data = parameters[2].detach().to(memory_format=torch.channels_last)
    shards = Shards(group, kind, torch.numel, one_copy=False, wire=wire_of("bf16"))
    shards.add(parameters)
    shards.make()
    shards.place_parameters()

    def exact(number, scale):
        return torch.linspace(-scale, scale, parameters[number].numel())

    def check(written):
        for piece in shards.pieces:
            values = exact(piece.number, 1.0)[piece.start : piece.stop]
            if piece.number in written:
                values = torch.full_like(values, 3.0)
            own = in_memory_order(piece.tensor.detach(), piece.tensor).to(torch.float32)
            agreed.append(torch.equal(own, values) and piece.tensor.dtype is piece.parameter.dtype)
            assert piece.tensor.data_ptr() >= min(
                master.data_ptr() for master in shards.masters.flats
            )

    agreed = []
    for piece in shards.pieces:
        piece.tensor.data.copy_(
            laid_out(exact(piece.number, 1.0)[piece.start : piece.stop], piece.tensor)
        )
    for number, parameter in enumerate(parameters):  # as the wire leaves them
        with torch.no_grad():
            parameter.copy_(laid_out(exact(number, 1.0).bfloat16().float(), parameter))
    shards.masters.mark_current(shards.pieces)
    parameters[3].requires_grad_(False)
    shards.refresh()
    check(())
    parameters[1].data = parameters[1].detach().clone()  # other memory, same values
    parameters[2].data = parameters[2].detach().double()
    parameters[0].data = torch.full((40, 9), 3.0)
    shards.follow()
    check((0,))
    agree(group, all(agreed), str(agreed))
