"""Messages of device memory: the streams that they are ordered with."""

from __future__ import annotations

import pytest
import torch

from tests.comm.places import Lazy
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_messages_carry_values_that_are_computed_late(place, group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for numel in (3, 5000):
        mine = torch.arange(float(numel)) + group.rank
        target = place.blank(mine)
        receive = group.irecv(target, left)
        send = group.isend(place.produce(mine), right)
        receive.wait()
        send.wait()
        agree(
            group,
            torch.equal(place.consume(target.clone), torch.arange(float(numel)) + left),
            f"{numel} elements",
        )


def test_every_wait_for_a_message_orders_its_own_stream(place, group):
    if not isinstance(place, Lazy):
        pytest.skip("the lazy device shows it")
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    target = place.blank(torch.ones(300))
    receive = group.irecv(target, left)
    group.isend(place.produce(torch.full((300,), 3.0)), right).wait()
    while not receive.is_completed():
        pass
    place.device.leave_default_stream()  # another stream than at the first test
    receive.wait()
    agree(group, bool((place.consume(target.clone) == 3).all()))
