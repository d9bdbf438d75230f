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

    @staticmethod
    def _create_remote_module_iter(remote_device, modes=None):
        # Without modes torch's tests use a compiled module, too.
        return remote_module_test.CommonRemoteModuleTest._create_remote_module_iter(
            remote_device, modes or [remote_module_test.ModuleCreationMode.MODULE_CTOR]
        )


class RemoteModuleSuite(OnNn, remote_module_test.RemoteModuleTest, common_utils.TestCase):
    """Tests of two workers."""


class ThreeWorkersSuite(
    OnNn, remote_module_test.ThreeWorkersRemoteModuleTest, common_utils.TestCase
):
    """Tests of three workers."""


class CudaSuite(OnNn, remote_module_test.CudaRemoteModuleTest, common_utils.TestCase):
    """Tests with CUDA devices."""
