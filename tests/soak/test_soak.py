"""A short soak on two ranks; its plan and its bounds. ``make soak`` runs an hour."""

import re

import pytest

from tests.soak import plan
from tests.soak.counts import CLOSED, MEMORY, OF_CLASS
from tests.soak.flat import Changes, Flat, told
from tests.soak.holders import chain
from tests.tools.support import launcher, python, started

SECONDS = 9
SEED = 5  # of which the first worlds are short


def test_the_first_worlds_of_the_job_are_short():
    assert max(len(plan.world(SEED, number).rounds) for number in range(10)) <= 3


def test_a_seed_gives_one_series_of_worlds():
    drawn = [plan.world(3, number) for number in range(40)]
    assert drawn == [plan.world(3, number) for number in range(40)]
    assert drawn != [plan.world(4, number) for number in range(40)]
    assert [one.beginning for one in drawn[: len(plan.BEGINNINGS)]] == list(plan.BEGINNINGS)
    assert {one.beginning for one in drawn[10:]} == set(plan.BEGINNINGS)
    assert {len(one.rounds) for one in drawn} == {1, 2, 3, 24}


def test_each_round_has_every_kind_in_an_order_of_its_own():
    rounds = [one for number in range(40) for one in plan.world(0, number).rounds]
    assert all(sorted(each.kind for each in one) == sorted(plan.KINDS) for one in rounds)
    assert len({tuple(each.kind for each in one) for one in rounds}) > 30
    some = plan.world(0, 5, ("ddp", "calls"))
    assert all({each.kind for each in one} == {"ddp", "calls"} for one in some.rounds)


def test_what_grows_is_named_with_its_kind():
    flat, changes = Flat(lambda name, bound: 10 * (name == MEMORY)), Changes()
    flat.learn({"threads": 5, MEMORY: 100})
    flat.learn({"threads": 4, MEMORY: 90, CLOSED: 2})
    assert flat.grown({"threads": 5, MEMORY: 110, CLOSED: 1}) == {}
    name = f"{OF_CLASS}mpidist.rpc.rref.RRef"
    after = {"threads": 6, MEMORY: 111, name: 3}
    grown = flat.grown(after)
    assert grown == {"threads": (5, 6), MEMORY: (100, 111), name: (0, 3)}
    changes.note("calls", {"threads": 6}, after)
    changes.note("ddp", {"threads": 6}, {"threads": 5})
    changes.note("ddp", {"threads": 5}, {"threads": 6})
    lines = told(grown, changes, ["b", "a"])
    assert f"{name}: 3, at most 0 before; by kind: calls +3 in 1" in lines
    assert "threads: 6 (a, b), at most 5 before; by kind: no kind by itself" in lines


class Held:
    """What the next test looks for."""


_holders: list[dict[str, list[Held]]] = []


@pytest.mark.slow
def test_the_chain_of_holders_begins_at_a_module_or_a_running_function():
    name = f"{__name__}.Held"
    _holders.append({"of": [Held()]})
    assert chain(name) == f"module {__name__} > list > dict > list > {name}"
    here = [_holders[0].pop("of").pop()]
    function = "test_the_chain_of_holders_begins_at_a_module_or_a_running_function"
    assert chain(name) == f"thread MainThread in {function} > list > {name}"
    del here
    assert chain(f"{__name__}.Other") == "it is gone"


@pytest.mark.slow
def test_a_soak_is_flat():
    words = ["-m", "tests.soak", "--seconds", str(SECONDS), "--seed", str(SEED)]
    job = [*launcher(2), *python(), *words]
    done = started(job, timeout_s=120)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "all counts are flat" in done.stdout
    runs = re.search(r"worlds, \d+ s: ({.*})", done.stdout)
    assert runs is not None and all(f"'{kind}': " in runs[1] for kind in plan.KINDS)
