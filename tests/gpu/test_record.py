"""Record of the last runs: kept over calls, and refused where it is none."""

import json

import pytest

from tests.gpu import record
from tests.gpu.plan import CUT_SHORT, FAILED, NEVER, OK, TIMED_OUT, Past
from tests.tools.support import ROOT


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "deep" / "steps.json"
    runs = {"b": Past(OK, 1.5, 2), "a": Past(FAILED, 20.0, 1)}
    record.write(path, "cuda", runs)
    record.write(path, "cpu", {"a": Past(OK, 0.1, 1)})  # a dry run keeps the GPU's
    assert record.past(record.read(path), device="cuda") == runs
    assert record.past(record.read(path), device="cpu") == {"a": Past(OK, 0.1, 1)}
    assert [one.name for one in path.parent.iterdir()] == ["steps.json"]


def test_a_later_record_replaces_an_earlier(tmp_path):
    entry = {"outcome": OK, "seconds": 3, "call": 0}
    old = {"cuda": {"a": entry, "b": entry}}
    new = {"cuda": {"a": {"outcome": FAILED, "seconds": 4, "call": 7}}}
    assert record.past(old, new, device="cuda") == {"a": Past(FAILED, 4, 7), "b": Past(OK, 3, 0)}
    assert record.past(old, device="cpu") == {}
    assert record.read(tmp_path / "none") == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"cuda": 1}', '{"cuda": {"a": {"outcome": "ok"}}}'])
def test_what_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"steps\.json is no record of make gpu, remove it"):
        record.read(path)


def test_a_run_that_was_ended_does_not_shorten_what_is_expected():
    assert record.updated(Past(OK, 90, 1), TIMED_OUT, 30, 2) == Past(TIMED_OUT, 90, 2)
    assert record.updated(Past(OK, 10, 1), CUT_SHORT, 30, 2) == Past(CUT_SHORT, 30, 2)
    assert record.updated(Past(OK, 90, 1), OK, 30.04, 2) == Past(OK, 30.0, 2)


def test_known_times_are_of_files_that_exist():
    known = record.read(record.KNOWN)
    for device, steps in known.items():
        assert record.past(known, device=device)
        for name, entry in steps.items():
            assert entry["outcome"] in (OK, NEVER, FAILED, TIMED_OUT, CUT_SHORT) and (
                entry["seconds"] > 0
            )
            kind, _, file = name.partition(":")
            if kind in ("aware", "staged", "nodes", "mpich"):
                folder, _, last = file.rpartition("/")
                assert (ROOT / "tests" / folder / f"test_{last}.py").exists(), name
    assert json.loads(record.KNOWN.read_text())["cuda"]
