"""Sharded optimizer on CUDA devices: bits, moves between devices, state in host memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mpidist.ddp import DistributedDataParallel
from mpidist.ddp.hooks.default import allreduce_hook
from mpidist.ddp.hooks.owners import to_owners
from mpidist.optim import OSS, ShardedGradScaler, ZeroRedundancyOptimizer, hook_with_zero_step
from tests.tools.support import agree, busy, without_host_waits

pytestmark = pytest.mark.mpi(min_size=2)

CPU = torch.device("cpu")
ADAMS = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}]
# Largest step between neighbouring values of a wire, in parts of the largest value of a block.
STEP_OF_WIRE = {"bf16": 2**-8, "fp16": 2**-11}


def net(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(33, 130), torch.nn.GELU(), torch.nn.Linear(130, 71)
    ).to(device)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(
            parameter.device, parameter.dtype
        )


def are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("partition", ["greedy", "balanced", "flat"])
def test_bits_are_those_of_the_unsharded_optimizer(group, target, partition):
    for settings in ADAMS if target.type == "cuda" else ADAMS[:3]:
        plain, sharded = net(target), net(target)
        whole = torch.optim.AdamW(plain.parameters(), lr=1e-2, **settings)
        oss = OSS(
            sharded.parameters(), torch.optim.AdamW, group, partition=partition, lr=1e-2, **settings
        )
        for step in range(6):
            for model, optimizer in ((plain, whole), (sharded, oss)):
                give_gradients(model, step)
                optimizer.step()
        agree(group, are_equal(plain, sharded), f"{settings}: parameters")
        state, expected = oss.state_dict(all_ranks=True)["state"], whole.state_dict()["state"]
        alike = all(
            torch.equal(state[number][name], value.cpu()) and not state[number][name].is_cuda
            for number, values in expected.items()
            for name, value in values.items()
        )
        agree(group, alike and list(state) == list(expected), f"{settings}: state")


def test_state_follows_parameters_to_the_device_and_back(group, target):
    plain, sharded = net(CPU), net(CPU)
    whole = torch.optim.Adam(plain.parameters(), lr=1e-2)
    oss = OSS(sharded.parameters(), torch.optim.Adam, group, partition="flat", lr=1e-2)
    for step, device in enumerate([CPU, target, target, CPU]):
        sharded.to(device)
        give_gradients(plain, step)
        give_gradients(sharded, step)
        whole.step()
        oss.step()
        agree(group, all(p.device == device for p in sharded.parameters()), f"step {step}: device")
        close = all(
            torch.allclose(a, b.cpu(), atol=1e-6)
            for a, b in zip(plain.parameters(), sharded.parameters(), strict=True)
        )
        agree(group, close, f"step {step}: values")


def test_host_and_device_parameters_in_one_optimizer(group, target):
    on_host, on_device = net(CPU), net(target)
    oss = OSS(
        [*on_host.parameters(), *on_device.parameters()],
        torch.optim.SGD,
        group,
        lr=0.1,
        momentum=0.9,
    )
    for step in range(3):
        give_gradients(on_host, step)
        give_gradients(on_device, step)
        oss.step()
    close = all(
        torch.allclose(a, b.cpu(), atol=1e-6)
        for a, b in zip(on_host.parameters(), on_device.parameters(), strict=True)
    )
    agree(group, close)
    norm = oss.clip_grad_norm(1e-3)
    agree(group, bool(norm > 1e-3))


def batch(group, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + group.rank)
    return torch.randn(16, 33, generator=generator).to(device)


def train(group, module, optimizer, steps, device, scaler=None, spoil=None) -> None:
    """Train behind slow kernels; ``spoil`` changes the gradients of one rank."""
    for step in steps:
        optimizer.zero_grad()
        busy(device)
        loss = module(batch(group, step, device)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if spoil is not None:
            spoil(step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def wrapped(group, module) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group)


def trained_plainly(group, target, steps, **settings):
    """Return a module and its unsharded optimizer after data-parallel steps."""
    module = net(target)
    whole = torch.optim.Adam(module.parameters(), lr=1e-2, **settings)
    train(group, wrapped(group, module), whole, steps, target)
    return module, whole


def sharded_adam(group, module, **settings) -> OSS:
    return OSS(module.parameters(), torch.optim.Adam, group, lr=1e-2, **settings)


def are_close(one, other, tolerance: float) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=tolerance) for a, b in pairs)


def same_state(found, wanted) -> bool:
    """Return whether a state dict has the bits of a device's, in the host's memory."""
    return list(found["state"]) == list(wanted["state"]) and all(
        torch.equal(found["state"][number][name], value.cpu())
        and not found["state"][number][name].is_cuda
        for number, values in wanted["state"].items()
        for name, value in values.items()
    )


@pytest.mark.parametrize("partition", ["greedy", "flat"])
@pytest.mark.parametrize("wire", STEP_OF_WIRE)
def test_a_narrow_wire_leaves_equal_bits_on_all_ranks(group, target, wire, partition):
    """Parameters are the unsharded optimizer's but for one rounding: masters collect no error."""
    plain, model = net(target), net(target)
    whole = torch.optim.Adam(plain.parameters(), lr=1e-2)
    oss = sharded_adam(group, model, partition=partition, wire=wire)
    for step in range(4):
        busy(target)
        give_gradients(model, step)
        give_gradients(plain, step)
        oss.step()
        whole.step()
    held = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    wanted = torch.cat([p.detach().flatten() for p in plain.parameters()]).cpu()
    far = float((held - wanted).abs().max() / wanted.abs().max() / STEP_OF_WIRE[wire])
    agree(group, 0 < far < 1, f"{far:.3f} steps of the wire")
    agree(group, all(torch.equal(held, other) for other in group.all_gather_object(held)))


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_it_trains_a_data_parallel_module_without_a_wait_for_the_host(group, target, partition):
    plain, _ = trained_plainly(group, target, range(5), fused=True)
    model = net(target)
    oss = sharded_adam(group, model, partition=partition, fused=True)
    module = wrapped(group, model)
    # The first steps make state and streams.
    train(group, module, oss, range(2), target)
    batches = {step: batch(group, step, target) for step in range(2, 5)}
    group.barrier()
    with without_host_waits(target):
        for x in batches.values():
            oss.zero_grad()
            module(x).square().mean().backward()
            oss.step()
    agree(group, are_equal(plain, model))


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_gradients_that_only_their_owners_have(group, target, partition):
    plain, _ = trained_plainly(group, target, range(5))
    model = net(target)
    oss, module = sharded_adam(group, model, partition=partition), wrapped(group, model)
    module.register_comm_hook(None, to_owners(oss.bounds()))
    train(group, module, oss, range(5), target)
    agree(group, are_close(plain, model, 1e-6))


@pytest.mark.parametrize("settings", [{}, {"fused": True}], ids=str)
def test_state_for_one_rank_and_for_all(group, target, settings):
    last = group.size - 1
    _, whole = trained_plainly(group, target, range(3), **settings)
    wanted = copy.deepcopy(whole.state_dict())
    model = net(target)
    oss, module = sharded_adam(group, model, partition="flat", **settings), wrapped(group, model)
    train(group, module, oss, range(3), target)
    oss.consolidate_state_dict(last)
    agree(group, group.rank != last or same_state(oss.state_dict(), wanted), "for one rank")
    agree(group, same_state(oss.state_dict(all_ranks=True), wanted), "for all ranks")


def test_a_ranks_own_state_goes_on_where_it_was(group, target):
    first, again = net(target), net(target)
    oss, second = (sharded_adam(group, one, partition="flat") for one in (first, again))
    train(group, wrapped(group, first), oss, range(3), target)
    train(group, wrapped(group, again), second, range(3), target)
    train(group, wrapped(group, again), second, range(3, 4), target)
    second.load_state_dict(oss.rank_local_state_dict())
    again.load_state_dict(first.state_dict())
    for model, optimizer in ((first, oss), (again, second)):
        train(group, wrapped(group, model), optimizer, range(3, 6), target)
    agree(group, are_equal(first, again))


@pytest.mark.usefixtures("default_group")
def test_torchs_distributed_checkpoint_saves_and_loads_shards(group, target, tmp_path):
    folder = group.broadcast_object(str(tmp_path), 0)
    models, optimizers = [net(target), net(target)], []
    for model, partition in zip(models, ("flat", "greedy"), strict=True):
        named = model.named_parameters()
        optimizers.append(OSS(named, torch.optim.Adam, group, lr=1e-2, partition=partition))
    train(group, wrapped(group, models[0]), optimizers[0], range(3), target)
    state = {"model": models[0].state_dict(), "optimizer": optimizers[0].sharded_state_dict()}
    dcp.save(state, checkpoint_id=folder)
    state = {"model": models[1].state_dict(), "optimizer": optimizers[1].sharded_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    models[1].load_state_dict(state["model"])
    optimizers[1].load_sharded_state_dict(state["optimizer"])
    agree(group, are_equal(*models), "as loaded")
    for model, optimizer in zip(models, optimizers, strict=True):
        train(group, wrapped(group, model), optimizer, range(3, 5), target)
    agree(group, are_equal(*models), "after further steps")


def test_an_infinite_gradient_in_one_shard_skips_the_step_on_all_ranks(group, target):
    """The last element of the last shard: an owner alone knows of it."""
    model = net(target)
    module, oss = wrapped(group, model), sharded_adam(group, model, partition="flat", fused=True)
    module.register_comm_hook(None, to_owners(oss.bounds()))
    scaler = ShardedGradScaler(target.type, init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]

    def spoil(step):
        if step == 0 and group.rank == group.size - 1:
            given = [p.grad for p in model.parameters() if p.grad is not None]
            given[-1].view(-1)[-1] = float("inf")

    train(group, module, oss, range(1), target, scaler, spoil)
    kept = all(map(torch.equal, before, model.parameters()))
    agree(group, kept and scaler.get_scale() == 512.0, f"kept {kept}, {scaler.get_scale()}")
    train(group, module, oss, range(1, 4), target, scaler)
    agree(group, not any(map(torch.equal, before, model.parameters())), "no step was taken")
    held = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    agree(group, all(torch.equal(held, other) for other in group.all_gather_object(held)))


@pytest.mark.usefixtures("default_group")
def test_steps_in_the_backward_pass(group, target):
    plain, _ = trained_plainly(group, target, range(5))
    model = net(target)
    module = wrapped(group, model)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-2
    )
    module.register_comm_hook(None, hook_with_zero_step(allreduce_hook, module, zero))
    for step in range(5):
        module.zero_grad()
        busy(target)
        module(batch(group, step, target)).square().mean().backward()
    agree(group, are_close(plain, model, 1e-6))
