"""Modules over ranks on CUDA devices: devices of remote modules, normalisation against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpidist.rpc as rpc
from mpidist.nn import RemoteModule, SyncBatchNorm
from tests.nn.nets import Named, net
from tests.tools.support import agree, busy

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(params=[False, True], ids=["no map", "map"])
def peer(group, target, request):
    ranks = range(group.size) if request.param else ()
    maps = {f"worker{rank}": {target: target} for rank in ranks}
    rpc.init_rpc(
        f"worker{group.rank}",
        group=group,
        rpc_backend_options=rpc.RpcBackendOptions(device_maps=maps),
    )
    yield f"worker{(group.rank + 1) % group.size}", request.param
    rpc.shutdown()


def test_arguments_are_moved_and_results_come_back(target, peer):
    to, is_map_set = peer
    module = RemoteModule(f"{to}/{target}", Named, (3,))
    is_cuda = is_map_set and target.type == "cuda"
    assert module.is_device_map_set is is_cuda
    x = torch.randn(2, 3)
    for result in (module(x, rest=[x]), module.forward_async(x, rest=[x]).wait()):
        assert result["out"].is_cuda is is_cuda and result["rest"][0].is_cuda is is_cuda
        torch.testing.assert_close(result["rest"][0].cpu(), x)


def test_states_travel_over_the_host_and_land_on_the_device(target, peer):
    to, _ = peer
    module, plain = RemoteModule(f"{to}/{target}", net), net()
    state = module.state_dict()
    assert not any(value.is_cuda for value in state.values())
    torch.testing.assert_close(dict(state), dict(plain.state_dict()))
    for assign in (False, True):
        module.load_state_dict(
            {name: torch.ones_like(value) for name, value in state.items()}, assign=assign
        )
        assert rpc.rpc_sync(to, devices_of, (module.get_module_rref(),)) == [str(target)]
        assert all(value.eq(1).all() for value in module.state_dict().values())


def devices_of(rref: rpc.RRef[nn.Module]) -> list[str]:
    return sorted({str(value.device) for value in rref.local_value().state_dict().values()})


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_normalisation_is_torchs_over_all_ranks(group, target, dtype, form):
    """torch's layer of that name takes CUDA tensors alone; on the CPU ``BatchNorm2d`` of all."""
    on_cuda = target.type == "cuda"
    ours = SyncBatchNorm(6, process_group=group, device=target)
    theirs = nn.BatchNorm2d(6, device=target)
    if on_cuda:
        theirs = nn.SyncBatchNorm.convert_sync_batchnorm(theirs)
    drawn = torch.randn(4 * group.size, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    whole = drawn.mul(2).add(3).to(target, dtype).contiguous(memory_format=form)
    share = lambda tensor: tensor.chunk(group.size)[group.rank]  # noqa: E731
    mine = share(whole).clone(memory_format=form).requires_grad_()
    its = (share(whole) if on_cuda else whole).clone(memory_format=form).requires_grad_()
    busy(target)
    found, wanted = ours(mine), theirs(its)
    found.float().square().sum().backward()
    wanted.float().square().sum().backward()
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    gradient = its.grad if on_cuda else share(its.grad)
    close = {
        "output": (found, wanted if on_cuda else share(wanted)),
        "gradient": (mine.grad, gradient),
        "variance": (ours.running_var, theirs.running_var),
        "mean": (ours.running_mean, theirs.running_mean),
    }
    far = [
        name
        for name, (one, other) in close.items()
        if not torch.allclose(one.float(), other.float(), rtol=tolerance, atol=10 * tolerance)
    ]
    agree(group, not far and found.device == target, f"{far} {found.device}")
