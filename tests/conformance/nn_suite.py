"""PyTorch's own tests of remote modules on mpidist.nn."""

from __future__ import annotations

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.nn.api.remote_module_test as remote_module_test

from mpidist.nn.remote_module import RemoteModule
from tests.conformance import suite


class OnNn(suite.OnMpidist):
    """What all of them need."""

    modules = (remote_module_test,)
    more = {"_RemoteModule": RemoteModule}  # noqa: RUF012


class RemoteModuleSuite(OnNn, remote_module_test.RemoteModuleTest, common_utils.TestCase):
    """The tests of two workers."""


class ThreeWorkersSuite(
    OnNn, remote_module_test.ThreeWorkersRemoteModuleTest, common_utils.TestCase
):
    """The tests of three."""


class CudaSuite(OnNn, remote_module_test.CudaRemoteModuleTest, common_utils.TestCase):
    """The tests with CUDA devices."""
