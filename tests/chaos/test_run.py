"""A handful of chaos; ``make chaos`` runs 200."""

import pytest

from tests.chaos import run as chaos


def test_cases_are_drawn_by_their_seeds():
    cases = [chaos.drawn(seed) for seed in range(200)]
    assert cases == [chaos.drawn(seed) for seed in range(200)]
    blows = [blow for case in cases for blow in case.blows]
    assert {blow.is_pause for blow in blows} == {False, True}
    assert {blow.step for blow in blows} >= {0, 1, chaos.STEPS // 3}
    for case in cases:
        assert sum(not blow.is_pause for blow in case.blows) <= case.spares
        assert all(blow.rank < case.ranks for blow in case.blows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("powersgd", "diloco")),
        "rpc",
        "fsdp",
    ],
)
def test_trainings_that_are_hit_end_with_the_same_bits(kind):
    # Of the first step, before any commit, and of a later one, behind the commit of the eighth.
    blows = (chaos.Blow(1, 0, 0.0005), chaos.Blow(2, 8, 0.01))
    case = chaos.Case(0, kind, 3, 2, blows, steps=20)
    outcome = chaos.run(case)
    wrong = chaos.problems(case, outcome, chaos.undisturbed(case))
    assert not wrong, f"{case}: {wrong}\n{outcome.text}"
