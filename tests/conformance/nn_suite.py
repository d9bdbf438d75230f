"""PyTorch's own tests of remote modules on mpidist.nn."""

from __future__ import annotations

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.nn.api.remote_module_test as remote_module_test

from mpidist.nn.remote_module import RemoteModule
from tests.conformance import suite


class OnNn(suite.OnMpidist):
    """Settings of all suites of remote modules."""

    modules = (remote_module_test,)
    more = {"_RemoteModule": RemoteModule}  # noqa: RUF012


class RemoteModuleSuite(OnNn, remote_module_test.RemoteModuleTest, common_utils.TestCase):
    """Tests of two workers."""


class ThreeWorkersSuite(
    OnNn, remote_module_test.ThreeWorkersRemoteModuleTest, common_utils.TestCase
):
    """Tests of three workers."""


class CudaSuite(OnNn, remote_module_test.CudaRemoteModuleTest, common_utils.TestCase):
    """Tests with CUDA devices."""
