"""PyTorch's RPC examples, which are tests in the wheel, on mpidist.rpc."""

from __future__ import annotations

import torch.testing._internal.common_utils as common_utils
from torch.testing._internal.distributed.rpc.examples import (
    parameter_server_test,
    reinforcement_learning_rpc_test,
)

from tests.conformance import suite


class ParameterServerSuite(
    suite.OnMpidist, parameter_server_test.ParameterServerTest, common_utils.TestCase
):
    """A parameter server that updates its model once per batch of gradients."""

    modules = (parameter_server_test,)


class ReinforcementLearningSuite(
    suite.OnMpidist,
    reinforcement_learning_rpc_test.ReinforcementLearningRpcTest,
    common_utils.TestCase,
):
    """An agent and its observers."""

    modules = (reinforcement_learning_rpc_test,)
