"""PyTorch's tests of data-parallel modules within distributed autograd, on mpidist.ddp."""

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
    """Create mpidist's default group for any requested backend, with the ranks of the job."""
    _init_process_group("mpidist")
    # A test assumes that all ranks have reached this line, as with a store that needs all ranks.
    dist.barrier()


class OnDdp(suite.OnMpidist):
    """Settings of all suites of this module."""

    modules = (ddp_test,)
    more = {"DistributedDataParallel": DistributedDataParallel}  # noqa: RUF012

    def surroundings(self):
        """Bind ``torch.distributed`` and a new shutdown signal, which serves one test."""
        return mock.patch.multiple(
            ddp_test, shutdown_signal=threading.Condition(), dist=_Distributed()
        )


class _Distributed:
    """``torch.distributed`` with another ``init_process_group``."""

    init_process_group = staticmethod(_init_on_mpi)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class ComparisonSuite(OnDdp, ddp_test.DdpComparisonTest, common_utils.TestCase):
    """Tests of four trainers: local against distributed autograd."""


class HybridSuite(OnDdp, ddp_test.DdpUnderDistAutogradTest, common_utils.TestCase):
    """Tests of six ranks: four trainers, a worker with the remote layers, a master."""
