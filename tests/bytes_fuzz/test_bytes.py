"""Fuzzing command: three thousand cases, and a report of each kind of fault."""

from __future__ import annotations

import random

import pytest

from tests.bytes_fuzz import checkpoints, mutations, watching
from tests.bytes_fuzz.targets import SHARES, TARGETS
from tests.tools.support import ROOT, python

COUNT = 3_000
SEED = 0


@pytest.mark.slow
def test_no_case_does_harm():
    counts = [COUNT * SHARES[target] // sum(SHARES.values()) for target in TARGETS]
    found = list(watching.results(TARGETS, counts, SEED))
    wrong = [result for result in found if "error" in result]
    report = "\n".join(
        f"{one['target']}: {one['error']}\n{one['trace']}\ncase: {one['case']}" for one in wrong
    )
    assert not wrong, report
    assert [result["target"] for result in found] == list(TARGETS)
    assert sum(result["count"] for result in found) > 0.99 * COUNT


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (b"k!", "SIGSEGV"),
        (b"x!", "status 0"),
        (b"o!", "open"),
        (b"w!", "open"),
        (b"m!", "MemoryError"),
        (b"g!", "KiB of memory"),
        (b"i!", "import"),
        (b"e!", "exec"),
        (b"r!", "KeyError"),
    ],
)
def test_a_fault_is_reported_with_its_case(case, error):
    (result,) = watching.results(["faults"], [0], SEED, case)
    assert (
        result["case"] == case.hex() and error in result["error"] and result["target"] == "faults"
    )


@pytest.mark.slow
def test_a_case_that_never_ends_is_reported(monkeypatch):
    monkeypatch.setattr(watching, "CASE_S", 0.5)
    (result,) = watching.results(["faults"], [0], SEED, b"s!")
    assert (
        result["case"] == b"s!".hex() and "no end" in result["error"] and "_spin" in result["trace"]
    )


def test_a_member_name_outside_ascii_is_not_reported(monkeypatch):
    """``zipfile`` imports its codec for such a name, once in a process."""
    (sample, *_) = checkpoints.samples()
    plain = checkpoints.rewritten(sample, lambda members: None)  # without the flag of UTF-8
    case = plain.replace(b"archive/version", b"archive/versio\xee")
    monkeypatch.setattr(watching, "INTERPRETER", python())
    (result,) = watching.results(["checkpoints"], [0], SEED, case)
    assert "error" not in result


def test_a_harmless_case_is_not_reported():
    (result,) = watching.results(["faults"], [0], SEED, b"a")
    assert "error" not in result


def test_a_target_that_fails_does_not_keep_the_next_from_being_read():
    found = list(watching.results(["faults", "faults"], [0, 0], SEED, b"k!"))
    assert [result["place"] for result in found] == [0, 1] and all(
        "SIGSEGV" in result["error"] for result in found
    )


def test_each_target_is_a_module_and_each_module_of_cases_a_target():
    folder = ROOT / "tests" / "bytes_fuzz"
    modules = {path.stem for path in folder.glob("*.py") if "\ndef check(" in path.read_text()}
    assert modules - {"faults"} == set(TARGETS)


def test_a_seed_gives_one_row_of_cases():
    samples = [b"abc", bytes(range(100))]
    rows = [
        [mutations.mutated(rng, samples) for _ in range(500)]
        for rng in map(random.Random, (7, 7, 8))
    ]
    assert rows[0] == rows[1] != rows[2]
    assert len(set(rows[0])) > 400 and max(map(len, rows[0])) <= mutations.MOST_BYTES
    assert set(samples) <= set(rows[0]), "now and then a sample comes as it is"
