"""State of one rank as data: scalars in one transfer, copies of device memory by pinned chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.algorithms import staging
from mpidist.zero.state.flat_state import FlatState
from mpidist.zero.state.result_memory import KeptMemory
from mpidist.zero.state.shard_state import InFlat, ShardState, entries_of, is_outside
from tests.comm.lazy_device import LazyDevice
from tests.tools.transfers import CUDA, counted, no_waits, waits

NUMBERS = range(30)


def entries_of_steps(device):
    """Return the entries of parameters each with a count of steps on a device and a factor."""
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
    return entries_of(pieces, FlatState(), state, {40: {"step": torch.ones(())}}), state


def state_with(flats, outside=(), masters=()):
    return ShardState(
        rank=0,
        groups=[],
        kinds=(),
        flats=tuple(flats),
        entries={number: {"rows": tensor, "step": 1} for number, tensor in enumerate(outside)},
        masters=tuple(masters),
        deferred={},
        plans=(),
        forms=(),
    )


def outside_of(state):
    return [tensor for *_, tensor in state.outside()]


def test_tensors_with_a_dimension_are_outside_the_flat_ones():
    found = [is_outside(one) for one in (torch.ones(1), torch.ones(()), InFlat(0), 1.0, None)]
    assert found == [True, False, False, False, False]


def test_entries_are_copies_of_scalars_and_other_tensors_themselves():
    entries, state = entries_of_steps("cpu")
    held = list(state.values())
    assert [entries[n]["step"].item() for n in NUMBERS] == [float(n) for n in NUMBERS]
    assert all(entries[n]["step"] is not held[n]["step"] for n in NUMBERS)
    assert all(entries[n]["row"].data_ptr() == held[n]["row"].data_ptr() for n in NUMBERS)
    assert [entries[n]["count"] for n in NUMBERS] == list(NUMBERS)
    assert entries[40]["step"] == 1 and not isinstance(entries[0]["step"], InFlat)


def test_steps_counted_on_a_device_are_one_transfer():
    """As those of fused and capturable optimizers are."""
    with counted() as counts:
        entries, _ = entries_of_steps(CUDA)
        assert entries[3]["step"].device.type == "cpu"
        assert counts.down == ["_to_copy"]


@pytest.mark.gpu
def test_steps_counted_on_a_gpu_wait_once():
    with waits() as found:
        entries, _ = entries_of_steps(CUDA)
    assert len(found) == 1
    assert [entries[n]["step"].item() for n in NUMBERS] == [float(n) for n in NUMBERS]


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
    state = state_with(held[:3], held[4:], held[3:4]).copied(KeptMemory())
    # Later steps change the state.
    for tensor in held:
        device.current().do(lambda tensor=tensor: tensor.fill_(7))
    device.current().record().synchronize()
    made = [*state.flats, *state.masters, *outside_of(state)]
    assert all(torch.equal(copy, value) for copy, value in zip(made, values, strict=True))
    assert len(pinned) == 3 and max(pinned) <= 256
    assert not device.strays


def test_copies_of_host_memory_take_no_pinned_memory():
    held = torch.arange(1000.0)
    rows = torch.arange(6.0).view(2, 3).t()
    before = state_with([held], [rows])
    state = before.copied(KeptMemory())
    held.fill_(0)
    assert torch.equal(state.flats[0], torch.arange(1000.0)) and state.entries[0]["step"] == 1
    assert torch.equal(outside_of(state)[0], rows) and before.entries[0]["rows"] is rows


@pytest.mark.gpu
def test_copies_of_a_gpus_memory_wait_for_events_alone():
    held = [torch.arange(3_000_000.0, device=CUDA), torch.ones(4, 5, device=CUDA).t()]
    memory = KeptMemory()
    state_with(held).copied(memory)  # pinned memory is allocated
    with no_waits():
        state = state_with(held).copied(memory)
    assert all(
        torch.equal(copy, value.cpu()) for copy, value in zip(state.flats, held, strict=True)
    )
