"""Printed tables of the benchmarks and of the demo: 80 columns, no word or number cut."""

import importlib
import importlib.util
import json
import math

import pytest

from tests.tools.support import ROOT, missing

RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = 80


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    for name in ("matplotlib", "rich", "scipy"):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def widest(text):
    return max(map(len, text.splitlines()))


def test_a_table_of_many_numbers_is_divided_and_keeps_its_first_column():
    tables = importlib.import_module("harness.tables")
    row = ("8 B", *(f"{place}2.3 (11.0–14.0)" for place in range(7)), 1.25, None)
    text = tables.text([row], ["size", *(f"way {place}\nus" for place in range(7)), "ratio", ""])
    first, *others = text.split("\n\n")
    assert widest(text) <= COLUMNS and others
    assert all(part.startswith(("size", " ")) and "8 B" in part for part in (first, *others))
    # A number and its range are on one line.
    assert all(text.count(cell) == 1 for cell in row[1:8]) and text.count("1.25") == 1


def test_sentences_wrap_between_words():
    tables = importlib.import_module("harness.tables")
    goal = "mpidist's all-reduce takes at most as long as Gloo's at every size of the run"
    text = tables.text([(goal, 1.2345, "not reached at 8 B, 64 B, 1 KiB")], ("goal", "", ""), ".2f")
    assert widest(text) <= COLUMNS and "1.23" in text and "1.2345" not in text
    words = text.split()
    assert all(word in words for word in goal.split())


def test_numbers_are_right_aligned_and_a_narrow_terminal_gets_all_characters():
    tables = importlib.import_module("harness.tables")
    assert tables.text([("a", 1), ("b", 23)], ("x", "n")).splitlines()[2:] == ["a   1", "b  23"]
    narrow = tables.text([("incomprehensibilities", "x" * 30)], width=20)
    assert widest(narrow) <= 20 and narrow.count("x") == 30


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("collectives-*.json")), ids=lambda path: path.stem
)
def test_recorded_collectives_fit(path):
    report = importlib.import_module("harness.report")
    record = json.loads(path.read_text())
    by_operation = {}
    for result in record["results"]:
        by_operation.setdefault(result["operation"], []).append(result)
    assert by_operation
    for rows in by_operation.values():
        assert widest(report.table(rows)) <= COLUMNS
    if "goals" in record:
        assert widest(report.goals_table(record["goals"])) <= COLUMNS


@pytest.mark.parametrize("name", ["ddp-openmpi-2", "powersgd-openmpi-2"])
def test_recorded_steps_fit(name):
    training_report = importlib.import_module("training.report")
    paths = sorted(RESULTS.glob(f"{name}*.json"))
    assert paths
    for path in paths:
        for result in json.loads(path.read_text())["results"]:
            assert widest(training_report.table(result)) <= COLUMNS


def test_the_recorded_scaling_report_fits():
    scaling_report = importlib.import_module("scaling.report")
    answer = importlib.import_module("scaling.answer")
    record = json.loads((RESULTS / "scaling-openmpi.json").read_text())
    # A file has null for an infinite rate.
    pays = [
        {
            **row,
            "fastest_up_to_gbit_s": [
                (hook, math.inf if rate is None else rate)
                for hook, rate in row["fastest_up_to_gbit_s"] or ()
            ],
        }
        for row in record["hooks_that_pay"]
    ]
    for text in (scaling_report.text_of(record), answer.text_of(pays)):
        # Titles are sentences, which a terminal wraps; the tables stand between them.
        tables = [line for line in text.splitlines() if "PREDICTED" not in line]
        assert max(map(len, tables)) <= COLUMNS, max(tables, key=len)


def test_the_demos_table_fits():
    demo_report = importlib.import_module("demo_report")
    row = {
        "method": "powersgd-4, OSS", "accuracies": [0.9722], "bytes_per_step": 593192.0,
        "uncompressed_bytes": 593192, "compressed_steps": 5, "steps": 10, "exposed_ms": 112.34,
        "samples_per_s": 123456.0, "state_bytes": [1234567, 5],
    }  # fmt: skip
    text = demo_report.table([row])
    assert widest(text) <= COLUMNS
    assert {"97.22%", "593,192", "1.0x", "50%", "112.34", "123,456", "1,206"} <= set(text.split())
    assert "…" not in text
