"""Schedules with made times: when trials begin, what is kept, and that ranks decide alike."""

import itertools

from mpidist.ddp.hooks.compression_schedule import Schedule, StepWatch, agreed_times
from mpidist.ddp.hooks.compression_trial import Times

LAYOUT = (("a", "b"), ("c",))
CANDIDATES = ("none", "powersgd-4")


def run(schedule, step_s, steps, layout=LAYOUT, first=0):
    """Run steps that take ``step_s(table)``; return their tables."""
    tables, last = [], 0.0
    for step in range(first, first + steps):
        if step:
            run_one(schedule, step, last, layout)
        tables.append(schedule.table)
        last = step_s(schedule.table)
    return tables


def run_one(schedule, step, last, layout=LAYOUT):
    """Begin a step after one of ``last`` seconds."""

    def times():
        part = tuple(last * (0.1 if name == "powersgd-4" else 0.2) for name in schedule.table)
        return Times(last, (0.0,) * len(layout), (0.0,) * len(layout), part)

    schedule.begin_step(step, layout, last, times, lambda values: values)


def fast_with(name):
    return lambda table: 1.0 if table and all(way == name for way in table) else 2.0


def test_plain_steps_a_trial_and_a_decision():
    schedule = Schedule(CANDIDATES, 3, 10, 0.1)
    tables = run(schedule, fast_with("powersgd-4"), 30)
    assert tables[:3] == [(), ("none", "none"), ("none", "none")]
    assert tables[3] == ("none", "none") and tables[6] == ("powersgd-4",) * 2
    assert tables[-1] == ("powersgd-4",) * 2 and not schedule.is_trying
    assert schedule.decided == {("a", "b"): "powersgd-4", ("c",): "powersgd-4"}
    assert list(schedule.measured) == list(CANDIDATES) and schedule.step_s == 1.0


def test_another_trial_when_steps_change():
    schedule = Schedule(CANDIDATES, 1, 5, 0.1)
    run(schedule, fast_with("powersgd-4"), 30)
    # A change below a tenth is none.
    tables = run(schedule, lambda table: 1.05, 20, first=30)
    assert set(tables) == {("powersgd-4",) * 2}
    tables = run(schedule, fast_with("none"), 30, first=50)
    assert tables[-1] == ("none", "none") and schedule.step_s == 1.0


def test_a_trial_that_decides_as_before_is_not_made_so_soon_again():
    schedule, factor, begun, was_trying = Schedule(CANDIDATES, 1, 4, 0.1), 1.0, [], False
    last = 0.0
    for step in range(1, 200):
        run_one(schedule, step, last)
        if schedule.is_trying and not was_trying:
            begun.append(step)
        was_trying = schedule.is_trying
        # Steps become longer and longer, for no reason that compression could mend.
        factor *= 1.0 if was_trying else 1.2
        last = factor * fast_with("powersgd-4")(schedule.table)
    gaps = [right - left for left, right in itertools.pairwise(begun)]
    assert gaps == sorted(gaps) and gaps[-1] > 2 * gaps[0], gaps


def test_buckets_that_are_laid_out_again_are_measured_again():
    schedule = Schedule(CANDIDATES, 1, 5, 0.1)
    run(schedule, fast_with("powersgd-4"), 30)
    run(schedule, fast_with("powersgd-4"), 1, (("c",), ("a", "b")), 30)
    assert schedule.table == ("powersgd-4",) * 2, "the same buckets in another order"
    run(schedule, fast_with("powersgd-4"), 1, (("c", "a"), ("b",)), 31)
    assert schedule.is_trying and not schedule.decided


def test_resumed():
    schedule = Schedule(CANDIDATES, 1, 3, 0.1)
    schedule.resume({("a", "b"): "none", ("c",): "powersgd-4"}, 1.0)
    tables = run(schedule, lambda table: 1.0, 9, first=20)
    assert tables == [("none", "powersgd-4")] * 9
    # Here steps take longer than in the run that was saved.
    schedule.resume({("a", "b"): "none", ("c",): "powersgd-4"}, 1.0)
    run(schedule, lambda table: 2.0, 6, first=40)
    assert schedule.is_trying
    # Other buckets than those that were saved.
    schedule.resume({("a",): "powersgd-4"}, 1.0)
    run(schedule, lambda table: 1.0, 1, first=60)
    assert schedule.is_trying


def test_ranks_agree_on_the_slowest_step_and_the_shortest_reduction():
    """One rank sleeps before its reductions: it measures them, and the others wait in theirs."""
    early = Times(3.0, (0.0, 1.0), (0.1, 0.1), (2.0, 0.5))
    late = Times(3.1, (0.0, 2.0), (0.3, 0.1), (0.4, 0.6))
    sent = []
    for one in (early, late):
        agreed_times([one, one], lambda values: sent.append(list(values)) or values)
    largest = [max(both) for both in zip(*sent, strict=True)]
    agreed = agreed_times([early, early], lambda values: largest)
    assert agreed == [Times(3.1, (0.0, 2.0), (0.3, 0.1), (0.4, 0.5))] * 2


def test_a_single_long_step_is_no_change():
    watch = StepWatch(5, 0.1)
    found = [watch.add(50.0 if step % 5 == 3 else 1.0, lambda values: values) for step in range(20)]
    assert not any(found) and watch.reference_s == 1.0
