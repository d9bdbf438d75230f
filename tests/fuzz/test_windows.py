"""Random programs of windows against their sequential model."""

import pytest

from tests.fuzz import run_windows, windows
from tests.fuzz.deadline import Deadline
from tests.tools.simulated_nodes import LAYOUTS, lay_out

STEPS = 400
LIMIT_S = 60


def test_a_seed_gives_one_program():
    assert windows.program(7, 3) == windows.program(7, 3)
    assert windows.program(7, 3) != windows.program(8, 3)


def test_every_way_comes_up():
    drawn = [windows.program(seed, 3) for seed in range(60)]
    writes = [write for one in drawn for phase in one.phases for write in phase.writes]
    assert {write.way for write in writes} == {"put", "async", "strided", "store"}
    assert {write.lane for write in writes} == set(range(windows.LANES))
    assert {phase.meets for one in drawn for phase in one.phases} == {"barrier", "signals"}
    assert any(phase.renewed is not None for one in drawn for phase in one.phases)
    assert any(windows.lost(one, 0) for one in drawn)
    assert all(one.steps >= 300 for one in drawn)
    mapped = [window.is_mapped for one in drawn for window in one.windows]
    assert {frozenset(each) for each in mapped} >= {
        frozenset({True}),
        frozenset({False}),
        frozenset({True, False}),
    }


def test_the_model_writes_in_order():
    first = windows.Write(0, 1, 0, 0, 2, 3, 98, "put")
    second = windows.Write(0, 1, 0, 0, 3, 1, 5, "put")
    phase = windows.Phase((first, second), "barrier", ((1, 0), (1, 0)), ((1, 0),), 0)
    last = windows.Phase((), "barrier", (), (), None)
    one = windows.Program(0, 2, (windows.WindowOf("uint8", (True, True), (6, 2)),), (phase, last))
    found = [[each.tolist() for each in state[0]] for state in windows.states(one)]
    assert found == [[[0, 0, 98, 5, 0, 0], [0, 0]], [[0] * 6, [0, 0]]]
    assert windows.lost(one, 0) == {1: 1} and not windows.lost(one, 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_programs_end_as_their_model(world, monkeypatch, capfd, layout):
    lay_out(world, monkeypatch, layout)
    # The deadline ends the process, so its message must not be captured.
    with capfd.disabled():
        deadline = Deadline(LIMIT_S, world.rank)
        for seed in range(2):
            deadline.start(
                f"mpirun -n {world.size} python -m tests.fuzz windows --seed {seed} --count 1"
            )
            failures = run_windows.run(windows.program(seed, world.size, STEPS), world, deadline)
            deadline.stop()
            assert not failures, f"{layout}, seed {seed}: " + "\n".join(failures)


@pytest.mark.mpi(min_size=2)
@pytest.mark.long
def test_a_long_program_ends_as_its_model(world, capfd):
    with capfd.disabled():
        deadline = Deadline(10 * LIMIT_S, world.rank)
        for seed in range(3):
            deadline.start(f"the long program of seed {seed}")
            failures = run_windows.run(windows.program(seed, world.size, 10_000), world, deadline)
            deadline.stop()
            assert not failures, f"seed {seed}: " + "\n".join(failures)
