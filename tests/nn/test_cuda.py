"""Remote modules on CUDA devices: devices of arguments and results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpidist.rpc as rpc
from mpidist.nn import RemoteModule
from tests.nn.nets import Named, net

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.gpu]


@pytest.fixture(params=[False, True], ids=["no map", "map"])
def on_gpu(group, request):
    maps = {f"worker{rank}": {0: 0} for rank in range(group.size)} if request.param else {}
    rpc.init_rpc(
        f"worker{group.rank}",
        group=group,
        rpc_backend_options=rpc.RpcBackendOptions(device_maps=maps),
    )
    yield f"worker{(group.rank + 1) % group.size}", request.param
    rpc.shutdown()


def test_arguments_are_moved_and_results_come_back(on_gpu):
    to, is_map_set = on_gpu
    module = RemoteModule(f"{to}/cuda:0", Named, (3,))
    assert module.is_device_map_set is is_map_set
    x = torch.randn(2, 3)
    for result in (module(x, rest=[x]), module.forward_async(x, rest=[x]).wait()):
        assert result["out"].is_cuda is is_map_set and result["rest"][0].is_cuda is is_map_set
        torch.testing.assert_close(result["rest"][0].cpu(), x)


def test_states_travel_over_the_host_and_land_on_the_device(on_gpu):
    to, _ = on_gpu
    module, plain = RemoteModule(f"{to}/cuda:0", net), net()
    state = module.state_dict()
    assert not any(value.is_cuda for value in state.values())
    torch.testing.assert_close(dict(state), dict(plain.state_dict()))
    for assign in (False, True):
        module.load_state_dict(
            {name: torch.ones_like(value) for name, value in state.items()}, assign=assign
        )
        assert rpc.rpc_sync(to, devices_of, (module.get_module_rref(),)) == ["cuda:0"]
        assert all(value.eq(1).all() for value in module.state_dict().values())


def devices_of(rref: rpc.RRef[nn.Module]) -> list[str]:
    return sorted({str(value.device) for value in rref.local_value().state_dict().values()})
