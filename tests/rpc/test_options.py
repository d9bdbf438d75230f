"""Options: accepted forms and rejected values."""

from datetime import timedelta

import pytest

from mpidist.rpc import TensorPipeRpcBackendOptions
from mpidist.rpc.options import RpcBackendOptions


def test_options():
    options = RpcBackendOptions(
        rpc_timeout=timedelta(seconds=2),
        device_maps={"w": {0: 1, "cuda:1": "cuda:0"}},
        devices=["cuda:2"],
    )
    assert options.rpc_timeout == 2.0 and options.device_maps == {"w": {0: 1, 1: 0}}
    assert [str(device) for device in options.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert TensorPipeRpcBackendOptions is RpcBackendOptions
    host = RpcBackendOptions(device_maps={"w": {"cpu": 0, 1: "cpu"}})
    assert host.device_maps == {"w": {-1: 0, 1: -1}}
    assert [str(device) for device in host.devices] == ["cuda:1"]
    for wrong in ({"w": {0: 1, 2: 1}}, {"w": {"cpu": 0, 1: 0}}, {"w": {"meta": 0}}):
        with pytest.raises(ValueError, match="device"):
            RpcBackendOptions(device_maps=wrong)
    with pytest.raises(ValueError, match="CUDA devices"):
        RpcBackendOptions(devices=["cpu"])
    for below in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            RpcBackendOptions(rpc_timeout=below)
    with pytest.raises(ValueError, match="num_worker_threads"):
        RpcBackendOptions(num_worker_threads=0)
