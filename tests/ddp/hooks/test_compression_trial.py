"""Trials with made times: what is tried, and which table is chosen."""

import random

import pytest

from mpidist.ddp.hooks.compression_trial import (
    BLOCK,
    SAME,
    Times,
    Trial,
    bound,
    in_order_of_loss,
    mixed,
    powersgd_rank,
    predicted_end,
    shortest,
)

CANDIDATES = ("none", "bf16", "powersgd-4")


def times(step_s, host_s=(0.0, 0.0), wire_s=(0.0, 0.0), ready_s=(0.0, 0.0)):
    return Times(step_s, ready_s, host_s, wire_s)


def tried(made, candidates=CANDIDATES, disturbed=(), trial=None):
    """Run a trial whose steps take ``made(table)``; return it and the tables of all steps."""
    trial, tables = trial or Trial(candidates, 2), []
    while trial.chosen is None:
        tables.append(trial.table)
        one = made(trial.table)
        is_first = tables[-2:-1] != tables[-1:]
        is_slow = is_first or (len(tables) % BLOCK in disturbed and len(tables) <= 3 * BLOCK)
        slow = 10 * one.step_s if is_slow else one.step_s
        trial.add(Times(slow, one.ready_s, one.host_s, one.wire_s))
        if trial.is_measured:
            trial.conclude(trial.own_times())
    return trial, tables


def by_bucket(seconds, base_s=1.0):
    """Return a function of a table: each method adds its seconds for each bucket to the step."""

    def made(table):
        wire = tuple(seconds[name][place] for place, name in enumerate(table))
        return times(base_s + sum(wire), wire_s=wire)

    return made


@pytest.mark.parametrize("disturbed", [(), (2,)])
def test_each_bucket_gets_its_fastest_method(disturbed):
    """The first step of each block, and one more, are ten times as long: they do not count."""
    seconds = {"none": (0.1, 3.0), "bf16": (0.2, 2.0), "powersgd-4": (0.5, 0.1)}
    trial, tables = tried(by_bucket(seconds), disturbed=disturbed)
    assert trial.chosen == ("none", "powersgd-4") and trial.table == trial.chosen
    # The plain average, then from the one that sends least.
    order = ("none", "powersgd-4", "bf16")
    assert tables[: 3 * BLOCK : BLOCK] == [(name, name) for name in order]
    assert ("none", "powersgd-4") in tables[3 * BLOCK :]
    assert ("none", "none") not in tables[3 * BLOCK :], "hopeless, and tried again"
    assert trial.by_candidate["bf16"].wire_s == (0.2, 2.0)


def test_the_step_decides_and_not_the_hooks():
    """Compressed buckets travel faster, and the step is longer: they take the processor."""

    def made(table):
        compressed = sum(name != "none" for name in table)
        return times(1.0 + 0.2 * compressed, wire_s=tuple(0.1 + (n == "none") for n in table))

    trial, tables = tried(made)
    assert trial.chosen == ("none", "none")
    assert len(tables) <= 30 and ("powersgd-4",) * 2 in tables


def test_of_equal_steps_the_one_that_loses_least():
    steps = {"none": 2.0, "bf16": 1.005, "powersgd-4": 1.0}
    wire = (0.75, 0.75)
    trial, _ = tried(lambda table: times(max(steps[name] for name in table), wire_s=wire))
    assert trial.chosen == ("bf16", "bf16")


def test_at_most_thirty_steps_with_five_candidates():
    five = in_order_of_loss(["powersgd-1", "powersgd-4", "uint8", "bf16", "none"])
    assert five == ("none", "bf16", "uint8", "powersgd-4", "powersgd-1")
    seconds = {name: (1.0 + 0.01 * place, 1.5 - 0.01 * place) for place, name in enumerate(five)}
    _, tables = tried(by_bucket(seconds), five)
    assert len(tables) <= 27


def test_what_a_slow_link_forbids_is_not_tried():
    five = in_order_of_loss(["powersgd-1", "powersgd-4", "uint8", "bf16", "none"])
    seconds = {"none": 8.0, "bf16": 4.0, "uint8": 2.5, "powersgd-4": 0.2, "powersgd-1": 0.1}
    made = by_bucket({name: (s, s) for name, s in seconds.items()})
    trial, tables = tried(made, five)
    assert trial.chosen == ("powersgd-1",) * 2 and list(trial.by_candidate) == [
        "none", "powersgd-4", "powersgd-1"
    ]  # fmt: skip
    assert len(tables) <= 3 * BLOCK + 8
    # The plain average may have sent a node's bytes once for each of 64 ranks.
    trial, _ = tried(made, five, trial=Trial(five, 2, plain_bytes=4 * 64))
    assert trial.chosen == ("powersgd-1",) * 2 and list(trial.by_candidate) == list(five)


def test_a_fast_link_needs_no_trial():
    seconds = {"none": (0.004, 0.005), "bf16": (0.002, 0.002), "powersgd-4": (0.001, 0.001)}
    trial, tables = tried(by_bucket(seconds))
    assert trial.chosen == ("none", "none") and len(tables) == BLOCK


class Unpruned(Trial):
    def _could_matter(self, name):
        return True


def test_nothing_is_lost_by_what_is_not_tried():
    """Any times that a link allows: the choice is as fast as that of a trial of all candidates."""
    five = in_order_of_loss(["powersgd-1", "powersgd-4", "uint8", "bf16", "none"])
    generator, steps, all_steps = random.Random(0), 0, 0
    for _ in range(60):
        rate = 10 ** generator.uniform(-2, 1)
        host = 10 ** generator.uniform(-3, 0)
        ready = sorted(generator.uniform(0, 1) for _ in range(2))
        parts = {}
        for name, share in zip(five, (1, 0.5, 0.25, 0.05, 0.02), strict=True):
            latency = generator.uniform(0, 0.02)
            parts[name] = [
                (host * generator.random() * (name != "none"), share * size / rate + latency)
                for size in (1.0, 0.3)
            ]

        def made(table, ready=ready, parts=parts):
            pairs = [parts[name][place] for place, name in enumerate(table)]
            host_s, wire_s = zip(*pairs, strict=True)
            end = predicted_end(ready, host_s, wire_s)
            return times(1.0 + end, host_s, wire_s, tuple(ready))

        trial, tables = tried(made, five)
        full, all_tables = tried(made, five, trial=Unpruned(five, 2))
        assert made(trial.chosen).step_s <= SAME**2 * made(full.chosen).step_s
        steps, all_steps = steps + len(tables), all_steps + len(all_tables)
    assert steps < 0.95 * all_steps


def test_least_times_of_a_candidate():
    plain = times(3.0, (0.5, 0.0), (1.0, 0.5), (0.0, 1.0))
    assert bound("powersgd-4", plain, 4) == times(1.0, ready_s=(0.0, 1.0))
    assert bound("uint8", plain, 2 * 8) == times(
        1.09375, wire_s=(1 / 16, 1 / 32), ready_s=(0.0, 1.0)
    )


def test_a_single_candidate_is_chosen_at_once():
    assert Trial(("none",), 3).chosen == ("none",) * 3


def test_a_hidden_bucket_is_not_compressed():
    """Bucket 0 has arrived before bucket 1 is ready, compressed or not."""
    found = {
        "none": times(1, wire_s=(0.5, 2.0), ready_s=(0.0, 1.0)),
        "powersgd-4": times(1, host_s=(0.1, 0.1), wire_s=(0.1, 0.1), ready_s=(0.0, 1.0)),
    }
    assert mixed(found) == ("none", "powersgd-4")
    assert mixed({"none": found["none"]}) == ("none", "none")
    # It would still be under way.
    found["none"] = times(1, wire_s=(1.5, 2.0), ready_s=(0.0, 1.0))
    assert mixed(found) == ("powersgd-4", "powersgd-4")


def test_buckets_travel_in_order():
    assert predicted_end((0, 1), (0, 0), (3, 1)) == 4
    assert predicted_end((0, 5), (0, 0.5), (3, 1)) == 6.5
    one, other = times(3, (1, 2), (3, 4)), times(2, (2, 1), (4, 3))
    assert shortest([one, other]) == times(2, (1, 1), (3, 3))
    assert one.buckets_s == (4, 6)


@pytest.mark.parametrize(
    ("candidates", "error", "text"),
    [
        (["none", "fp4"], ValueError, "'fp4'"),
        (["none", "powersgd-0"], ValueError, "powersgd-0"),
        (["none", "powersgd-x"], ValueError, "powersgd-x"),
        (["bf16"], ValueError, "'none' among them"),
        (["none", "none"], ValueError, "different"),
        (["none", 8], TypeError, "8"),
    ],
)
def test_wrong_candidates(candidates, error, text):
    with pytest.raises(error, match=text):
        in_order_of_loss(candidates)


def test_names_of_ranks():
    assert [powersgd_rank(name) for name in ("powersgd-12", "none", "powersgd-", "12")] == [
        12,
        None,
        None,
        None,
    ]
