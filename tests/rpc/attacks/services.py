"""One-way messages of control, and requests that are no calls: counts, words, fetches, gradients."""

from __future__ import annotations

import struct

import mpidist.autograd  # noqa: F401  # registers the engine that these messages are for
import mpidist.rpc as rpc
from mpidist.rpc.data_values import REFERENCE
from mpidist.rpc.message import GRADIENTS, PAIR, REFERENCES, Kind, written_references
from tests.rpc.attacks import victim
from tests.rpc.attacks.attacker import Attacker, Attacks
from tests.rpc.attacks.data import array, encode, own

attack = Attacks()

REFUSED = "refused a message|FrameError"
_FAR = (1 << 64) - 1


def noted(name: str, idea: str, kind: int, header: bytes, reason: str, flags: int = 0) -> None:
    """Note an attack: one message that nobody answers."""

    def run(attacker: Attacker) -> None:
        attacker.send(kind, header, flags=flags)

    run.__name__ = name
    attack(idea, reason)(run)


def words(*numbers: int) -> bytes:
    """Write numbers."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


# Quiescence: rank 0 is the coordinator, and the attacked.
noted("verdict", "The end's verdict, of a worker that does not coordinate", Kind.QUIET_VERDICT, words(0, 1), REFUSED)
noted("verdict_empty", "A verdict without words", Kind.QUIET_VERDICT, b"", REFUSED)
noted("verdict_odd", "A verdict of seven bytes", Kind.QUIET_VERDICT, b"\0" * 7, REFUSED)
noted("report_empty", "A report without words", Kind.QUIET_REPORT, b"", REFUSED)
noted("report_short", "A report of one count", Kind.QUIET_REPORT, words(0, 1), REFUSED)
noted("report_long", "A report of nine counts", Kind.QUIET_REPORT, words(0, *range(9)), REFUSED)
noted("report_odd", "A report of 41 bytes", Kind.QUIET_REPORT, b"\0" * 41, REFUSED)

# References.
noted("fork_odd", "A fork without its number", Kind.RREF_FORK, words(1), REFUSED)
noted("fork_cut_off", "Forks that are cut off", Kind.RREF_FORK, b"\0" * 15, REFUSED)
noted("delete_odd", "A delete without its number", Kind.RREF_USER_DELETE, words(1), REFUSED)
noted("delete_cut_off", "Deletes that are cut off", Kind.RREF_USER_DELETE, b"\0" * 3, REFUSED)
noted("delete_unknown", "A delete of what is not there", Kind.RREF_USER_DELETE, words(_FAR, _FAR), "")

# Distributed autograd.
noted("notice_empty", "A notice without content", Kind.AUTOGRAD_NOTICE, b"", REFUSED)
noted("notice_int", "A notice that is an int", Kind.AUTOGRAD_NOTICE, encode(1), REFUSED)
noted("notice_short", "A notice of one field", Kind.AUTOGRAD_NOTICE, encode([1]), REFUSED)
noted("notice_unknown", "A notice that there is not", Kind.AUTOGRAD_NOTICE, encode([99, 1]), REFUSED)
noted("notice_text", "A notice whose kind is a text", Kind.AUTOGRAD_NOTICE, encode(["eval", 1]), REFUSED)
noted("done_text", "DONE of a pass that is a text", Kind.AUTOGRAD_NOTICE, encode([1, 1, "x", "y"]), REFUSED)
noted("failed_error", "FAILED with what is no error", Kind.AUTOGRAD_NOTICE, encode([2, 1, 1, 5]), REFUSED)
noted("stop_fields", "STOP of five fields", Kind.AUTOGRAD_NOTICE, encode([3, 1, 2, 3, 4]), REFUSED)
noted("summary_forged", "SUMMARY with hops that are texts", Kind.AUTOGRAD_NOTICE, encode([5, 1, 1, {"x": "y"}, "z"]), REFUSED)
noted("await_unknown", "AWAIT of sends that are not there", Kind.AUTOGRAD_NOTICE, encode([6, 1, 1, True, [1, 2]]), REFUSED)
noted("report_text", "REPORT with texts in the place of ranks", Kind.AUTOGRAD_NOTICE, encode([8, 1, 1, "s", 1, ["x"]]), REFUSED)
noted("clean_up_text", "CLEANUP of a context that is a list", Kind.AUTOGRAD_NOTICE, encode([9, []]), REFUSED)
noted("notice_damaged", "A notice that is no data", Kind.AUTOGRAD_NOTICE, b"\xc1", REFUSED)
noted("gradients_empty", "Gradients without words", Kind.GRADIENTS, b"", REFUSED)
noted("gradients_cut_off", "Gradients that are cut off", Kind.GRADIENTS, b"\0" * 10, REFUSED)
noted("gradients_text", "Gradients that are texts", Kind.GRADIENTS, GRADIENTS.pack(1, 1, 1, 0) + encode(["x"]), "")
noted(
    "gradients_unknown",
    "Gradients of a context that there is not, for a worker that there is not",
    Kind.GRADIENTS,
    GRADIENTS.pack(1, _FAR, 1, 0) + b"\xc0",
    REFUSED,
)
noted("back_empty", "Gradients of a request, without words", Kind.REQUEST_GRADIENTS, b"", REFUSED)


@attack("A fetch without a number", "FrameError")
def fetch_nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.RREF_FETCH, b"\0")


@attack("A backward pass without fields", "FrameError|ValueError|TypeError")
def backward_nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.BACKWARD_AUTOGRAD, b"")


@attack("A backward pass of what is no reference", "FrameError|ValueError|TypeError")
def backward_no_reference(attacker: Attacker) -> object:
    return attacker.request(Kind.BACKWARD_AUTOGRAD, encode([1, 2, True, "fast"]))


@attack("A service that there is not", "no service|FrameError")
def unknown_service(attacker: Attacker) -> object:
    return attacker.call("mpidist.rpc.current:require", array(), kind=Kind.CALL_SERVICE)


@attack("A service by the name of a listed function", "no service|FrameError")
def listed_as_service(attacker: Attacker) -> object:
    return attacker.call("tests.rpc.attacks.victim:look", array(), kind=Kind.CALL_SERVICE)


@attack("A service without a name", "no service|without a function's name|FrameError")
def unnamed_service(attacker: Attacker) -> object:
    return attacker.call("", array(), kind=Kind.CALL_SERVICE)


@attack("A method of what is no reference", "reference|TypeError|FrameError")
def method_of_data(attacker: Attacker) -> object:
    return attacker.call("get", array(encode(5)), kind=Kind.CALL_METHOD)


@attack("A method without a value", "reference|TypeError|FrameError")
def method_of_nothing(attacker: Attacker) -> object:
    return attacker.call("get", array(), kind=Kind.CALL_METHOD)


@attack("A method of a dict that looks like a reference", "reference|TypeError|FrameError")
def method_of_dict(attacker: Attacker) -> object:
    return attacker.call("get", array(encode({"local_value": 1})), kind=Kind.CALL_METHOD)


@attack("A method's name that is no UTF-8", "UnicodeDecodeError|FrameError|may not be called")
def method_no_text(attacker: Attacker) -> object:
    return attacker.call(b"\xff", array(), kind=Kind.CALL_METHOD)


@attack("A call whose result would stay under another value's number", "")
def number_taken(attacker: Attacker) -> None:
    box = rpc.remote(attacker.to, victim.Box, args=(7,))
    box._get_future().wait()
    prefix = PAIR.pack(box._reference, attacker.agent.references.store.make_id())
    try:
        attacker.call("tests.rpc.attacks.victim:echo", array(encode(1)), kind=Kind.REMOTE_PYTHON, prefix=prefix)
    except Exception:
        pass
    assert box.rpc_sync(timeout=5).get() == 7, "another call has taken the place of a value"


@attack("A method without a name", "may not be called|not in the list")
def unnamed_method(attacker: Attacker) -> object:
    box = rpc.remote(attacker.to, victim.Box, args=(7,))
    box._get_future().wait()
    header = written_references([box.fork(attacker.to)]) + b"\0\0" + array(own(REFERENCE, 0))
    return attacker.request(Kind.CALL_METHOD, header, flags=REFERENCES)


@attack("A method of another worker's value", "RRefError|can't call localValue", ranks=3)
def method_of_others(attacker: Attacker) -> object:
    header = written_references([(1, 2, 2)]) + b"\3\0get" + array(own(REFERENCE, 0))
    return attacker.request(Kind.CALL_METHOD, header, flags=REFERENCES)
