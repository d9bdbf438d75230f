"""Random collective programs, and the properties of their generator and references."""

import pytest
import torch

from tests.fuzz import generator, operands, programs, references, run_programs
from tests.fuzz.deadline import Deadline
from tests.fuzz.values import values_of

# Programs by number of ranks, most at 3, because two hide wrong neighbors; other sizes run the
# first 20.
COUNT = {3: 100}
LIMIT_S = 60


def calls_of(program):
    return [step for step in program.steps if isinstance(step, programs.Call)]


def test_a_seed_gives_one_program():
    assert generator.program(7, 3) == generator.program(7, 3)
    assert generator.program(7, 3) != generator.program(8, 3)


def test_every_kind_and_every_feature_comes_up():
    drawn = [generator.program(seed, 3) for seed in range(400)]
    calls = [call for program in drawn for call in calls_of(program)]
    assert {call.kind for call in calls} == {
        *programs.REDUCING,
        *programs.MOVING,
        *programs.OBJECTS,
        "barrier",
    }
    assert {call.dtype for call in calls} == set(programs.MOVES)
    assert {call.overlap for call in calls} >= {"own", "first", "last", "same", "shifted"}
    assert {type(step) for program in drawn for step in program.steps} >= set(
        programs.Step.__args__
    )


def test_a_program_without_a_feature_has_none_of_it():
    drawn = [
        generator.program(seed, 3, ("overlap", "inference", "premul", "debug", "torch"))
        for seed in range(200)
    ]
    calls = [call for program in drawn for call in calls_of(program)]
    assert {call.overlap for call in calls} == {"", "own"}
    assert not any(
        "inference" in call.modes or call.factors or "torch" in call.apis for call in calls
    )
    assert not any(
        group.is_debug or group.is_torch for program in drawn for group in program.groups
    )


def test_kept_steps_keep_their_groups():
    program = next(
        p for p in (generator.program(seed, 3) for seed in range(100)) if len(p.groups) > 3
    )
    place = max(
        i
        for i, step in enumerate(program.steps)
        if not isinstance(step, (programs.Make, programs.Close))
    )
    rest = programs.kept(program, (place,))
    created = {step.group for step in rest.steps if isinstance(step, programs.Make)}
    assert program.steps[place] in rest.steps
    assert programs.groups_of(program.steps[place]) <= created


def test_an_expected_result_fits_each_output():
    for seed in range(60):
        program = generator.program(seed, 3, ("large",))
        for call in calls_of(program):
            if call.kind in (*programs.OBJECTS, "barrier") or call.must_refuse:
                continue
            size = len(program.groups[call.group].members)
            for rank in range(size):
                ours = operands.operands(call, rank, size)
                results = references.expected(call, rank, size)
                assert [values.numel() for values, _ in results] == [
                    ours.tensors[i].numel for i in ours.outputs
                ]


def test_a_reference_sum_of_integers_is_exact():
    call = programs.Call(
        "all_reduce", 0, ("native",) * 2, (False,) * 2, ("",) * 2, (0,) * 2, seed=5, counts=(6,)
    )
    parts = [
        values_of(call, operands.operands(call, rank, 2).tensors[0]).flatten() for rank in range(2)
    ]
    ((values, tolerance),) = references.expected(call, 0, 2)
    assert tolerance is None
    assert torch.equal(values, parts[0] + parts[1])


@pytest.mark.mpi
def test_random_programs_have_the_results_of_the_references(world, capfd):
    # The deadline ends the process, so its message must not be captured.
    with capfd.disabled():
        deadline = Deadline(LIMIT_S, world.rank)
        with run_programs.torch_default_group():
            for seed in range(COUNT.get(world.size, 20)):
                deadline.start(
                    f"mpirun -n {world.size} python -m tests.fuzz programs --seed {seed} --count 1"
                )
                failures = run_programs.run(generator.program(seed, world.size), world, deadline)
                deadline.stop()
                assert not failures, f"seed {seed}: " + "\n".join(failures)
