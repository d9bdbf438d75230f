"""All-gather of byte strings of any lengths."""

import pytest

from mpidist.comm.mpi.byte_strings import gathered
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_strings_of_different_lengths_come_by_rank(group):
    strings = [bytes([rank]) * (3 * rank % 4) for rank in range(group.size)]
    for own in (strings, [b""] * group.size, [b"x" * 70_000] * group.size):
        found = gathered(group._comm.mpi, own[group.rank])
        agree(group, found == own, f"{[len(text) for text in found]}")
