"""PyTorch's CUDA tests of RPC, distributed autograd and remote modules, from two ranks up.

Those of which torch's decorator asks for no more devices than there are. Tests that name devices in
the calling thread alone run on the host, too.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore")]

_WORDS = "asks for the words of torch's agent; tests/rpc/test_cuda.py asks for ours"
NOT_APPLICABLE = {
    "test_input_moved_to_cuda_device_script": "compiles a remote module by TorchScript",
} | dict.fromkeys(
    (
        "test_device_maps_wrong_worker_name",
        "test_device_maps_invalid_max_local_device",
        "test_device_maps_invalid_max_remote_device",
        "test_device_maps_many_to_one",
        "test_device_maps_one_to_many",
        "test_device_maps_missing_config",
        "test_device_maps_missing_config_loop",
        "test_device_maps_missing_config_not_timeout",
        "test_device_maps_missing_config_remote",
        "test_device_maps_missing_config_remote_response",
        "test_device_maps_missing_config_response",
        "test_device_maps_missing_config_response_loop",
        "test_devices_option_mismatch",
        "test_devices_option_mismatch_reverse",
    ),
    _WORDS,
)

# Tests of RPC that can run on the host: their devices are never used, or are the host.
RPC_ON_HOST = ("test_device_map_cpu", "test_device_maps_invalid_min_device")


def names_at(function, size: int) -> list[str]:
    """Return the tests of a function in a job of ``size`` ranks."""
    if size < 2:
        return []
    from tests.conformance import autograd_suite, nn_suite, rpc_suite, suite

    module = {"rpc": rpc_suite, "autograd": autograd_suite, "nn": nn_suite}[function.module]
    source = getattr(module, function.suite)
    # Without a device the names are those of one device, of which -m then takes none.
    most = max(torch.cuda.device_count(), 1)
    return [
        name
        for name in function.names or suite.names_of(source)
        if name not in NOT_APPLICABLE and suite.needed_devices(source, name) <= most
    ]


@pytest.mark.gpu
def test_rpc(name, group):
    from tests.conformance import rpc_suite, suite

    suite.run_on_all(rpc_suite.CudaSuite, name, group)


def test_rpc_on_host(name, group):
    from tests.conformance import rpc_suite, suite

    is_cuda = suite.needed_devices(rpc_suite.CudaSuite, name) > 0
    suite.run_on_all(rpc_suite.CudaSuite, name, group, on_host=is_cuda)


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_autograd(name, group, on_host):
    from tests.conformance import autograd_suite, suite

    suite.run_on_all(autograd_suite.CudaSuite, name, group, on_host=on_host)


@pytest.mark.gpu
@pytest.mark.mpi(min_size=4)
def test_autograd_with_device_maps(name, group):
    from tests.conformance import autograd_suite, suite

    suite.run_on_all(autograd_suite.DeviceMapsSuite, name, group)


@pytest.mark.gpu
def test_remote_modules(name, group):
    from tests.conformance import nn_suite, suite

    suite.run_on_all(nn_suite.CudaSuite, name, group)


for _function, _module, _suite, _names in (
    (test_rpc, "rpc", "CudaSuite", ()),
    (test_rpc_on_host, "rpc", "CudaSuite", RPC_ON_HOST),
    (test_autograd, "autograd", "CudaSuite", ()),
    (test_autograd_with_device_maps, "autograd", "DeviceMapsSuite", ()),
    (test_remote_modules, "nn", "CudaSuite", ()),
):
    _function.module, _function.suite, _function.names = _module, _suite, _names
