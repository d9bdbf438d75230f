"""CUDA tensors in calls and references, by device maps: device pointers or pinned memory."""

from __future__ import annotations

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from tests.tools.support import agree, busy, own_stream, without_host_waits

pytestmark = pytest.mark.mpi(min_size=2)
SIZES = [0, 1, 3000, 1_000_003]


def echo(x):
    return x


def slow_double(x):
    """Queue work that is not done when the function returns."""
    busy(x.device)
    return x * 2


@pytest.fixture
def peer(group, target):
    # before it, messages go over the host where ranks share devices
    group.all_reduce(torch.ones(1, device=target))
    options = rpc.RpcBackendOptions(
        device_maps={f"worker{rank}": {target: target} for rank in range(group.size)}
    )
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    yield f"worker{(group.rank + 1) % group.size}"
    rpc.shutdown()


@pytest.mark.parametrize("numel", SIZES)
def test_tensors_come_to_their_device_and_back(target, peer, numel):
    tensor = torch.arange(numel, device=target, dtype=torch.float32)
    for there in (
        rpc.rpc_sync(peer, echo, args=(tensor,)),
        rpc.rpc_async(peer, echo, args=(tensor,)).wait(),
    ):
        assert there.device == target and torch.equal(there, tensor)


def test_values_wait_for_the_kernels_that_make_them(target, peer):
    tensor = torch.ones(1_000_000, device=target)
    busy(target)
    tensor += 1  # behind the sleep when the call begins
    assert rpc.rpc_sync(peer, slow_double, args=(tensor,)).eq(4).all()
    reference = rpc.remote(peer, slow_double, args=(tensor,))
    assert reference.to_here().eq(4).all()
    assert (
        rpc.rpc_async(peer, slow_double, args=(tensor,))
        .then(lambda future: future.wait() + 1)
        .wait()
        .eq(5)
        .all()
    )


def test_views_share_and_mixed_devices_travel(target, peer):
    base = torch.zeros(1000, 10, device=target)
    whole, part, host = rpc.rpc_sync(peer, echo, args=([base, base[5], torch.ones(3)],))
    part.fill_(1)
    assert (
        whole[5].eq(1).all()
        and host.device.type == "cpu"
        and torch.equal(rpc.rpc_sync(peer, echo, args=(base.t(),)), base.t())
    )


def test_hundreds_of_tensors_travel_in_one_message(target, peer):
    tensors = [torch.full((place % 50,), place, device=target) for place in range(600)]
    found = rpc.rpc_sync(peer, echo, args=(tensors,))
    assert all(map(torch.equal, found, tensors))
    assert len({one.untyped_storage().data_ptr() for one in found if one.numel()}) == sum(
        1 for one in found if one.numel()
    )


def test_a_reference_is_fetched_behind_the_stream_that_computes_it(target, peer):
    value = torch.ones(1_000_000, device=target)
    with own_stream(target):
        busy(target)
        value += 1
        reference = rpc.RRef(value)
    assert rpc.rpc_sync(peer, fetched_sum, args=(reference,)) == 2_000_000
    assert reference.local_value().sum().item() == 2_000_000


def fetched_sum(reference):
    return reference.to_here().sum().item()


def doubled_on(x, device):
    assert x.device == torch.device(device), x.device
    return x * 2


def test_an_echo_makes_the_host_wait_nowhere(group, target, peer):
    tensors = [torch.arange(numel, device=target, dtype=torch.float32) for numel in SIZES]
    for tensor in tensors:
        rpc.rpc_sync(peer, echo, args=(tensor,))
    # Both workers are past their first messages, which make streams and memory.
    group.barrier()
    with without_host_waits(target):
        found = [rpc.rpc_sync(peer, echo, args=(tensor,)) for tensor in tensors]
        # The mode is the process's: a peer may still be served here.
        group.barrier()
    agree(group, all(map(torch.equal, found, tensors)))


@pytest.mark.gpu
@pytest.mark.parametrize(("here", "there"), [("cpu", "cuda:0"), ("cuda:0", "cpu")])
@pytest.mark.parametrize("numel", [1, 100_003])
def test_a_map_moves_tensors_between_host_and_device(group, here, there, numel):
    group.all_reduce(torch.ones(1, device="cuda"))
    to = f"worker{(group.rank + 1) % group.size}"
    options = rpc.RpcBackendOptions(device_maps={to: {here: there}})
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    x = torch.arange(numel, dtype=torch.float32, device=here)
    found = rpc.rpc_sync(to, doubled_on, args=(x, there))
    assert found.device == x.device and torch.equal(found, x * 2)
    assert torch.equal(rpc.remote(to, doubled_on, args=(x, there)).to_here(), x * 2)
    rpc.shutdown()


@pytest.mark.gpu
def test_a_device_without_a_map_is_refused(group):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    with pytest.raises(ValueError, match="set_device_map"):
        rpc.rpc_sync(
            f"worker{(group.rank + 1) % group.size}", echo, args=(torch.ones(1, device="cuda"),)
        )
    rpc.shutdown()
    options = rpc.RpcBackendOptions(device_maps={"nobody": {0: 0}})
    with pytest.raises(MpidistError, match="device maps name workers"):
        rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
