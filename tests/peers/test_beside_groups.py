"""Busy groups beside a program, on the ranks of a job."""

import sys

import pytest
import torch

from tests.peers.beside_groups import Busy, search_first
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


def test_groups_are_busy_until_the_last_program_has_ended(group):
    busy = Busy()
    values = torch.ones(3)
    for _ in range(20):
        group.all_reduce(values)
        values /= group.size
    busy.stop()
    agree(group, min(busy.rounds) > 0 and values.tolist() == [1, 1, 1], str(busy.rounds))


def test_a_wrong_result_is_told_at_the_end(group):
    busy = Busy()
    busy.wrong.append("round 1 of group 0")
    with pytest.raises(RuntimeError, match="round 1 of group 0"):
        busy.stop()


def test_modules_of_a_package_come_first():
    before = set(sys.modules)
    search_first("mpi4py")
    is_first = [name.partition(".")[0] == "mpi4py" for name in sys.modules]
    assert is_first.index(False) == sum(is_first) > 0
    assert set(sys.modules) == before
