"""PyTorch's tests of DistributedOptimizer, from the installed wheel, on mpidist.optim over mpidist.autograd and mpidist.rpc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.rpc.dist_optimizer_test as optimizer_test

import mpidist.autograd
import mpidist.optim
from tests.conformance import rpc_suite


class OptimizerSuite(rpc_suite.OnMpidist, optimizer_test.DistOptimizerTest, common_utils.TestCase):
    """The tests of the optimizer."""


@contextlib.contextmanager
def ours_in_place_of_torchs() -> Iterator[None]:
    """Bind the names by which the suite reaches torch's optimizer and its autograd to ours."""
    ours = {
        "rpc": rpc_suite.bound(),
        "dist_autograd": mpidist.autograd,
        "DistributedOptimizer": mpidist.optim.DistributedOptimizer,
    }
    with mock.patch.multiple(optimizer_test, **ours):
        yield


def run(name: str, group) -> None:
    """Run one test on all ranks.

    Collective: over ``group``.
    """
    with ours_in_place_of_torchs():
        rpc_suite.run(OptimizerSuite, name, group)
