"""Buffers of rank 0, broadcast before the forward pass."""

import pytest
import torch

from mpidist.ddp.module import DistributedDataParallel
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
