"""Messages of plain host memory that need no handle."""

import pytest
import torch

from mpidist.comm.messages import direct_messages, p2p
from tests.comm.messages.test_p2p import ring
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("numel", [0, 2, 300_000])
def test_messages_that_arrive_soon_need_no_handle(group, monkeypatch, numel):
    monkeypatch.setattr(direct_messages, "_SPIN_S", 60.0)
    monkeypatch.setattr(p2p, "RequestWork", None)
    right, left = ring(group)
    into, ok = torch.zeros(numel), True
    for turn in range(20):
        out = torch.full((numel,), group.rank + turn + 0.5)
        for is_sending in (True, False) if group.rank else (False, True):
            if is_sending:
                group.send(out, right)
            else:
                ok &= group.recv(into, left) == left and bool((into == left + turn + 0.5).all())
    agree(group, ok)
