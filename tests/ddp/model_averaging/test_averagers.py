"""Steps at which ``PeriodicModelAverager`` averages, as torch's does."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers as theirs

from mpidist.ddp.model_averaging.averagers import PeriodicModelAverager
from tests.support import agree, raises_on_all

pytestmark = pytest.mark.mpi


@pytest.mark.usefixtures("default_group")
def test_steps_are_torchs(group):
    for period, warmup_steps in [(2, 0), (4, 3), (3, 5)]:
        mine = PeriodicModelAverager(period, warmup_steps, group)
        torchs = theirs.PeriodicModelAverager(period, warmup_steps, dist.group.WORLD)
        # torch's default group, on mpidist.
        default = PeriodicModelAverager(period, warmup_steps)
        for step in range(14):
            found = []
            for averager in (mine, torchs, default):
                weight = torch.nn.Parameter(torch.full((3,), float(group.rank)))
                weight.grad = torch.zeros(3)
                averager.average_parameters(iter([weight]))
                found.append(float(weight[0].detach()))
            is_time = step >= warmup_steps and (step - warmup_steps) % period == 0
            want = (group.size - 1) / 2 if is_time else group.rank
            agree(group, found == [want] * 3, f"step {step}: {found}")
        agree(group, mine.step == torchs.step == 14)


def test_wrong_arguments_are_refused_on_all_ranks(group):
    for arguments, error, words in [
        ({"period": 0}, ValueError, "period must be at least 1"),
        ({"period": -2}, ValueError, "period must be at least 1"),
        ({"period": 2, "warmup_steps": -1}, ValueError, "warmup_steps must not be negative"),
        ({"period": 1.5}, TypeError, "period must be an int"),
        ({"period": 2, "process_group": "nccl"}, TypeError, "needs a group of mpidist"),
    ]:
        call = {"process_group": group, **arguments}
        raises_on_all(group, error, lambda call=call: PeriodicModelAverager(**call), words)
    with pytest.warns(UserWarning, match="every step"):
        PeriodicModelAverager(1, process_group=group)
