"""Trace files: what json loads, and what the reader gives back."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from mpidist.trace.chrome_file import Reading, text_of, written

EVENTS = [{"ph": "X", "name": 'a "b"\n', "ts": 1.5}, {"ph": "M"}]


def write(path, events=EVENTS):
    with written(path) as file:
        file.begin({"mpidist": {"size": 2}})
        file.write(map(text_of, events))
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize("events", [EVENTS, []])
def test_file_is_json_and_is_read_back(tmp_path, name, events):
    path = write(tmp_path / name, events)
    opened = gzip.open if name.endswith("gz") else open
    with opened(path, "rt") as file:
        whole = json.load(file)
    assert whole["traceEvents"] == events and whole["displayTimeUnit"] == "ns"
    reading = Reading(path)
    assert reading.facts == {"mpidist": {"size": 2}}
    assert list(reading.events()) == events
    assert [json.loads(line) for line in reading.lines()] == events


def test_file_that_another_program_wrote_is_read_as_a_whole(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": EVENTS, "host_name": "n"}, indent=2))
    reading = Reading(path)
    assert reading.facts == {"host_name": "n"} and list(reading.events()) == EVENTS
    assert len(list(reading.lines())) == 2
    again = tmp_path / "again.json"
    again.write_text(json.dumps(json.loads(write(tmp_path / "own.json").read_text())))
    assert Reading(again).facts == {"mpidist": {"size": 2}}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": 3}', "\x1f\x8bnot gzip"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"t\.json is no trace"):
        Reading(path)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_cut_file_is_refused(tmp_path, name):
    events = [{"ph": "X", "ts": number, "name": str(number * 7919 % 1000)} for number in range(999)]
    path = write(tmp_path / name, events)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cut"):
        list(Reading(path).events())


def test_failed_writer_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), written(tmp_path / "t.json"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_file_is_read_in_the_encoding_in_which_it_was_written(tmp_path, suffix):
    path = tmp_path / f"rank0{suffix}"
    text = json.dumps({"traceEvents": [{"name": "modèle"}]}, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    program = (
        "import sys; from pathlib import Path; from mpidist.trace.chrome_file import Reading; "
        "print(ascii(list(Reading(Path(sys.argv[1])).events())))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program, str(path)],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.stdout.strip() == "[{'name': 'mod\\xe8le'}]", done.stderr
