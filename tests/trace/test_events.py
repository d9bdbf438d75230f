"""Tracks, slices and arrows as events."""

import json

from mpidist.comm.recorder.recording import Kind
from mpidist.trace.events import Slice, SliceTexts, Spot, Tracks, arrow, spot_of_end
from tests.trace.made import entry


def placed(entries, tracks=None, main=7, threads=None):
    tracks = tracks or Tracks(3)
    slices = list(
        tracks.placed(entries, lambda time_ns: time_ns + 100, 100, 1100, threads or {}, main)
    )
    return tracks, slices


def test_slices_of_a_track_nest():
    outer, inner, crossing, after = (
        entry(0, 10), entry(2, 5), entry(4, 12), entry(12, 20),
    )  # fmt: skip
    tracks, slices = placed([after, crossing, inner, outer])
    assert [(one.entry, one.track) for one in slices] == [
        (outer, 0), (inner, 0), (crossing, 1), (after, 0),
    ]  # fmt: skip
    assert tracks.names == ["main", "main (2)"] and tracks.main == [0, 1]
    assert (slices[0].begin_ns, slices[0].end_ns) == (0, 10)


def test_threads_have_tracks_of_their_own():
    tracks, slices = placed(
        [entry(0, 5), entry(1, 6, thread=8), entry(2, 3, thread=9)], threads={8: "mpidist-x"}
    )
    assert [one.track for one in slices] == [0, 1, 2]
    assert tracks.names == ["main", "mpidist-x", "thread 9"] and tracks.main == [0]


def test_entry_under_way_ends_with_the_trace():
    _, slices = placed([entry(5, None), entry(6, 2)])
    assert slices[0].end_ns == 1000
    # A clock that went back has no negative duration.
    assert slices[1].end_ns == slices[1].begin_ns


def test_text_of_a_slice_is_its_event():
    one = entry(
        1500, 4000, Kind.SEND, 'se"nd', group="g", dtype="float32", shape=(2, 3),
        size_bytes=24, peer=1, tag=5, failed=True,
    )  # fmt: skip
    texts = SliceTexts(3)
    for _ in range(2):  # the second time from what is known of the signature
        assert json.loads(texts.of(Slice(one, 4, 1500, 4000))) == {
            "ph": "X", "name": 'se"nd', "cat": "send", "pid": 3, "tid": 4, "ts": 1.5, "dur": 2.5,
            "args": {
                "group": "g", "dtype": "float32", "shape": [2, 3], "bytes": 24, "peer": 1,
                "tag": 5, "failed": True,
            },
        }  # fmt: skip
    bare = json.loads(texts.of(Slice(entry(0, None, Kind.STEP, "SGD"), 0, 0, 9)))
    assert bare["args"] == {"unfinished": True}


def test_arrow_lies_within_its_slices():
    one = Slice(entry(0, 10), 2, 1000, 3000)
    assert spot_of_end(1, one) == Spot(1, 2, 2999)
    assert spot_of_end(1, one._replace(end_ns=1000)).time_ns == 1000
    start, finish = map(json.loads, arrow(9, "last", Spot(0, 1, 1000), Spot(1, 2, 2999)))
    assert start == {
        "ph": "s", "cat": "arrow", "name": "last", "id": 9, "pid": 0, "tid": 1, "ts": 1.0,
    }  # fmt: skip
    assert finish["ph"] == "f" and finish["bp"] == "e" and finish["id"] == 9
    assert finish["ts"] == 2.999


def test_names_of_processes_and_tracks():
    tracks, _ = placed([entry(0, 5)])
    events = [json.loads(text) for text in tracks.described("node7")]
    assert {event["name"]: event["args"] for event in events} == {
        "process_name": {"name": "rank 3"},
        "process_labels": {"labels": "node7"},
        "process_sort_index": {"sort_index": 3},
        "thread_name": {"name": "main", "is_main": True},
    }
