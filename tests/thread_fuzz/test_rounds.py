"""Two threads on one group: the first seeds of the fuzzer."""

import pytest

from tests.fuzz.deadline import Deadline
from tests.thread_fuzz import rounds
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)


def test_two_threads_use_and_close_one_group(world):
    deadline = Deadline(60.0, world.rank)
    for seed in range(40):
        deadline.start(f"round {seed}")
        failures = rounds.run(seed, world, deadline)
        deadline.stop()
        agree(world, not failures, f"seed {seed}: {failures}")
