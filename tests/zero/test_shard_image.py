"""Image of one rank's state: scalars in one transfer, copies of device memory by pinned chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.algorithms import staging
from mpidist.zero import shard_image
from mpidist.zero.flat_state import FlatState
from mpidist.zero.result_memory import KeptMemory
from mpidist.zero.shard_image import InFlat, Loose, ShardImage
from tests.comm.lazy_device import LazyDevice
from tests.transfers import CUDA, counted, no_waits, waits

NUMBERS = range(30)


def image_of_steps(device):
    """Return the image of parameters each with a count of steps on a device and a factor."""
    parameters = [torch.zeros(2, device=device) for _ in NUMBERS]
    pieces = [SimpleNamespace(number=n, tensor=parameters[n], home=None) for n in NUMBERS]
    state = {
        parameters[n]: {
            "step": torch.full((), float(n), device=device),
            "row": torch.ones(3, device=device),
            "count": n,
        }
        for n in NUMBERS
    }
    shards = SimpleNamespace(
        pieces=pieces,
        masters=SimpleNamespace(flats=()),
        seen=list,
        plans=(),
        parameters=parameters,
    )
    return shard_image.image_of(shards, FlatState(), state, {40: {"step": torch.ones(())}}, 0)


def image_with(flats, loose=(), masters=()):
    return ShardImage(0, (), tuple(flats), tuple(loose), {}, tuple(masters), (), (), ())


def test_entries_are_copies_of_scalars_and_places_of_tensors():
    image = image_of_steps("cpu")
    assert [image.entries[n]["step"].item() for n in NUMBERS] == [float(n) for n in NUMBERS]
    assert [image.entries[n]["row"] for n in NUMBERS] == [Loose(n) for n in NUMBERS]
    assert [image.entries[n]["count"] for n in NUMBERS] == list(NUMBERS)
    assert image.entries[40]["step"] == 1 and not isinstance(image.entries[0]["step"], InFlat)


def test_steps_counted_on_a_device_are_one_transfer():
    """As those of fused and capturable optimizers are."""
    with counted() as counts:
        image = image_of_steps(CUDA)
        assert image.entries[3]["step"].device.type == "cpu"
        assert counts.down == ["_to_copy"]


@pytest.mark.gpu
def test_steps_counted_on_a_gpu_wait_once():
    with waits() as found:
        image = image_of_steps(CUDA)
    assert len(found) == 1
    assert [image.entries[n]["step"].item() for n in NUMBERS] == [float(n) for n in NUMBERS]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_copies_hold_what_the_device_computes_late_through_few_pinned_chunks(monkeypatch, seed):
    device, pinned = LazyDevice(seed), []
    staged = device.staging
    monkeypatch.setattr(
        device,
        "staging",
        lambda numel, dtype: pinned.append(numel * dtype.itemsize) or staged(numel, dtype),
    )
    monkeypatch.setattr(staging, "device_of", lambda tensors: device)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 256)
    values = [
        torch.arange(1000.0),
        torch.arange(70, dtype=torch.int64),
        torch.empty(0),
        torch.arange(500).to(torch.bfloat16),
        torch.arange(12, dtype=torch.uint8).view(3, 4),
    ]
    held = [torch.zeros_like(value) for value in values]
    for tensor, value in zip(held, values, strict=True):
        device.current().do(lambda tensor=tensor, value=value: tensor.copy_(value))
    image = image_with(held[:3], held[4:], held[3:4]).copied(KeptMemory())
    # Later steps change the state.
    for tensor in held:
        device.current().do(lambda tensor=tensor: tensor.fill_(7))
    device.current().record().synchronize()
    made = [*image.flats, *image.masters, *image.loose]
    assert all(torch.equal(copy, value) for copy, value in zip(made, values, strict=True))
    assert len(pinned) == 3 and max(pinned) <= 256
    assert not device.strays


def test_copies_of_host_memory_take_no_pinned_memory():
    held = torch.arange(1000.0)
    image = image_with([held], [torch.arange(6.0).view(2, 3).t()]).copied(KeptMemory())
    held.fill_(0)
    assert torch.equal(image.flats[0], torch.arange(1000.0))
    assert torch.equal(image.loose[0], torch.arange(6.0).view(2, 3).t())


@pytest.mark.gpu
def test_copies_of_a_gpus_memory_wait_for_events_alone():
    held = [torch.arange(3_000_000.0, device=CUDA), torch.ones(4, 5, device=CUDA).t()]
    memory = KeptMemory()
    image_with(held).copied(memory)  # pinned memory is allocated
    with no_waits():
        image = image_with(held).copied(memory)
    assert all(
        torch.equal(copy, value.cpu()) for copy, value in zip(image.flats, held, strict=True)
    )
