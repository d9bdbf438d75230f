"""``torch.nn.SyncBatchNorm`` on mpidist: evaluation, and torch's error for training on the CPU."""

import pytest
import torch
from torch import nn

from tests.tools.support import agree, raises_on_all

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.usefixtures("default_group")]


def converted():
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    plain(torch.randn(8, 5))  # running statistics that are not the initial ones
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert isinstance(synchronised[1], nn.SyncBatchNorm)
    return synchronised


def test_evaluation_matches_batch_norm(world):
    synchronised = converted().eval()
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    plain(torch.randn(8, 5))
    x = torch.randn(3, 5)
    agree(world, torch.equal(synchronised(x), plain.eval()(x)), "outputs differ")


def test_training_on_the_cpu_is_torchs_error(world):
    synchronised = converted()
    expected = "SyncBatchNorm expected input tensor to be on GPU or XPU or privateuseone"
    raises_on_all(world, ValueError, lambda: synchronised(torch.randn(8, 5)), expected)
