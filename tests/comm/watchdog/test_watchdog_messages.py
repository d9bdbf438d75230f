"""Messages between watchdogs: exact round trips, and invalid ones; pure."""

import pytest

from mpidist.comm.execution import op_status as journals
from mpidist.comm.execution.op_status import Call, History
from mpidist.comm.serialization import frame
from mpidist.comm.watchdog import watchdog_messages
from mpidist.comm.watchdog.arrivals import Arrivals
from mpidist.comm.watchdog.last_operations import LastOperations
from mpidist.comm.watchdog.watchdog_messages import Answer
from mpidist.errors import FrameError
from tests.reports.made import collective
from tests.tools.support import EndsProcess

ENTRY = journals.Entry("group", "key", 3, "barrier", (2, 3), "float32", 1.5, 0)
NONE = ([], {}, "")


def bytes_of(*content):
    return bytes(frame.to_bytes(content, data_only=True))


FOREIGN = {
    "nothing": b"",
    "a pickle": bytes(frame.to_bytes(("left", 0, EndsProcess()))),
    "a refusal": b"".join([frame.refusal("x")[0], *frame.refusal("x")[1]]),
    "no message": bytes_of("left"),
    "an unknown kind": bytes_of("__init__", 0, ()),
    "a kind that is no text": bytes_of([], 0, ()),
    "a number that is none": bytes_of("printed", "0", ("a", "b")),
    "a question without a subject": bytes_of("ask", 1, (("a",), 0)),
    "an answer without entries": bytes_of(
        "answer",
        1,
        ([("group", "key", 3, "barrier", [], None, None, 0, 0, False)], (), (0, []), NONE),
    ),
    "an answer that is cut": bytes_of("answer", 1, ([("group",)], (), (0, []), NONE)),
    "an answer without a place": bytes_of("answer", 1, ([], (3,), (0, []), NONE)),
    "an answer without a history": bytes_of("answer", 1, ([], (), (0, [("barrier", None)]), NONE)),
    "an answer without last operations": bytes_of("answer", 1, ([], (), (0, []))),
    "an answer with others": bytes_of("answer", 1, ([], (), (0, []), ([("x",)], {}, ""))),
    "a failure of no group": bytes_of("failed", 0, ("key", "text", ["a"])),
    "an end with other values": bytes_of("left", 0, {"group": "3"}),
    "arrivals at no group": bytes_of("arrivals", 0, [("key", "label", 2, 0)]),
    "an end with other calls": bytes_of("left", 0, {"group": (1, [("barrier", "x", None)])}),
}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("ask", (("key", "barrier number 1"), 0)),
        (
            "answer",
            Answer(
                [ENTRY, journals.Entry("group", "key", 0, "none", None, None, None, 0, 1, True)],
                ("main thread: train.py:3 in load_data()",),
                History(3, (Call("all_reduce", (2, 3), "float32"), Call("barrier"))),
                LastOperations((collective(1, -2, -1), collective(2, -1)), {7: ""}, "worker0"),
            ),
        ),
        ("printed", ("key", "barrier number 1")),
        ("failed", ("key", "text", (0, 2))),
        ("arrivals", [Arrivals("key", "label", 2, 0, b"times")]),
        ("left", {"key": History(3, (Call("barrier"),)), "other": History()}),
    ],
)
def test_messages_are_decoded_as_encoded(kind, content):
    assert watchdog_messages.decoded(watchdog_messages.encoded(kind, 7, content)) == (
        kind,
        7,
        content,
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_an_invalid_message_is_refused(name):
    with pytest.raises(FrameError):
        watchdog_messages.decoded(FOREIGN[name])
