"""PyTorch's own tests of data-parallel modules within distributed autograd: mpidist.ddp on torch's group of our backend."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.ddp_under_dist_autograd_test as ddp_test

from mpidist.ddp import DistributedDataParallel
from tests.conformance import suite

_init_process_group = dist.init_process_group


def _init_on_mpi(backend: str, **kwargs: Any) -> None:
    """Have the default group be ours, whatever backend a test asks for; its ranks are the job's."""
    _init_process_group("mpidist")
    # a test takes it that all others have come so far, as with a store that all must reach
    dist.barrier()


class OnDdp(suite.OnMpidist):
    """What all of them need."""

    modules = (ddp_test,)
    more = {"DistributedDataParallel": DistributedDataParallel}  # noqa: RUF012

    def surroundings(self):
        """Return what a test runs in: a fresh signal, for it is notified once, and a default group of ours."""
        return mock.patch.multiple(
            ddp_test, shutdown_signal=threading.Condition(), dist=_Distributed()
        )


class _Distributed:
    """``torch.distributed`` with another ``init_process_group``."""

    init_process_group = staticmethod(_init_on_mpi)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class ComparisonSuite(OnDdp, ddp_test.DdpComparisonTest, common_utils.TestCase):
    """The tests of four trainers, local against distributed autograd."""


class HybridSuite(OnDdp, ddp_test.DdpUnderDistAutogradTest, common_utils.TestCase):
    """The tests of six ranks: four trainers, a worker with the remote layers, a master."""
