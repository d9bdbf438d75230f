"""Sharded optimizer on CUDA devices: bits, moves between devices, state in host memory."""

from __future__ import annotations

import pytest
import torch

from mpidist.ddp import DistributedDataParallel
from mpidist.optim import OSS
from tests.support import agree

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

CUDA = torch.device("cuda", 0)
ADAMS = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}]


def net(device: torch.device = CUDA) -> torch.nn.Module:
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
def test_bits_are_those_of_the_unsharded_optimizer(group, partition):
    for settings in ADAMS:
        plain, sharded = net(), net()
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


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_narrow_wire_leaves_equal_bits_on_all_ranks(group, wire):
    model = net()
    oss = OSS(model.parameters(), torch.optim.Adam, group, partition="flat", wire=wire, lr=1e-2)
    for step in range(4):
        give_gradients(model, step)
        oss.step()
    held = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    agree(group, all(torch.equal(held, other) for other in group.all_gather_object(held)))


def test_state_follows_parameters_to_the_device_and_back(group):
    plain, sharded = net(torch.device("cpu")), net(torch.device("cpu"))
    whole = torch.optim.Adam(plain.parameters(), lr=1e-2)
    oss = OSS(sharded.parameters(), torch.optim.Adam, group, partition="flat", lr=1e-2)
    for step, device in enumerate([torch.device("cpu"), CUDA, CUDA, torch.device("cpu")]):
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


def test_host_and_device_parameters_in_one_optimizer(group):
    on_host, on_device = net(torch.device("cpu")), net()
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


def test_it_trains_a_data_parallel_module_without_a_wait_for_the_host_in_between(group):
    plain, sharded = net(), net()
    whole = torch.optim.Adam(plain.parameters(), lr=1e-2)
    averaged, model = (
        DistributedDataParallel(plain, process_group=group),
        DistributedDataParallel(sharded, process_group=group),
    )
    oss = OSS(model.parameters(), torch.optim.Adam, group, lr=1e-2)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(5):
        x = torch.randn(16, 33, generator=generator).to(CUDA)
        for net_, optimizer in ((averaged, whole), (model, oss)):
            optimizer.zero_grad()
            net_(x).square().mean().backward()
            optimizer.step()
    agree(group, are_equal(plain, sharded))
