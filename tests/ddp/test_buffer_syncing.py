"""Buffers of rank 0, broadcast before the forward pass."""

import pytest
import torch

from mpidist.ddp.module import DistributedDataParallel
from mpidist.errors import DisagreementError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


class Counting(torch.nn.Module):
    """A module whose forward pass adds 1 to a buffer and uses the buffer."""

    def __init__(self, start):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(float(start)))

    def forward(self, x):
        self.count += 1
        return self.weight * self.count * x


def seen_by(ddp, group, passes=3):
    """Return the buffer's value within and after each pass."""
    found = []
    for _ in range(passes):
        out = ddp(torch.ones(()))
        out.backward()
        found += [float(out), float(ddp.module.count)]
    return found


def test_each_averaged_pass_begins_with_the_buffers_of_rank_0(group):
    ddp = DistributedDataParallel(Counting(0), process_group=group)
    # Changed after the construction, so that the forward pass synchronizes.
    ddp.module.count.fill_(10.0 * group.rank)
    found = seen_by(ddp, group)
    agree(group, found == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0], str(found))
    ddp.broadcast_buffers = False
    ddp.module.count.fill_(10.0 * group.rank)
    found = seen_by(ddp, group, passes=1)
    agree(group, not ddp.forward_sync_buffers and found == [10.0 * group.rank + 1] * 2, str(found))


class Observed(torch.nn.Module):
    """A module with a buffer that is empty until its first use."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        return self.weight * x


@pytest.mark.mpi(min_size=2)
def test_a_buffer_that_has_grown_on_one_rank_is_an_error_there_and_shifts_no_other(group):
    net = Observed()
    ddp = DistributedDataParallel(net, process_group=group)
    ddp(torch.ones(())).backward()
    if group.rank == 0:
        net.low.resize_(3).fill_(-7.0)
        net.mean.fill_(1.0)
        ddp(torch.ones(()))
    else:
        with pytest.raises(DisagreementError, match="12 bytes, and this rank expected 0"):
            ddp(torch.ones(()))
        # The rest of the first one's forward pass.
        group.broadcast(net.mean, 0)
    agree(group, net.mean.tolist() == [1.0] * 3, str(net.mean))
