"""PyTorch's own tests of DistributedOptimizer on mpidist.optim."""

from __future__ import annotations

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.rpc.dist_optimizer_test as optimizer_test

from tests.conformance import suite


class OptimizerSuite(suite.OnMpidist, optimizer_test.DistOptimizerTest, common_utils.TestCase):
    """Tests of the optimizer."""

    modules = (optimizer_test,)
