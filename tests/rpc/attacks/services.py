"""Attacks by control messages and requests other than calls: counts, fetches, gradients."""

from __future__ import annotations

import struct
from collections.abc import Callable

import mpidist.autograd  # noqa: F401  # registers the engine that these messages are for
import mpidist.rpc as rpc
from mpidist.rpc import current
from mpidist.rpc.message import GRADIENTS, PAIR, REFERENCES, Kind, pack_references
from mpidist.rpc.worker_gather import broadcast_to_follower, gather_to_leader
from tests.rpc.attacks import victim
from tests.rpc.attacks.attacker import Attacker, Attacks
from tests.rpc.attacks.data import array, encode, reference

attack = Attacks()

REFUSED = "refused a message|FrameError"
_FAR = (1 << 64) - 1


def register(name: str, idea: str, kind: int, header: bytes, reason: str, flags: int = 0) -> None:
    """Register an attack by one one-way message."""

    def run(attacker: Attacker) -> None:
        attacker.send(kind, header, flags=flags)

    run.__name__ = name
    attack(idea, reason)(run)


def words(*numbers: int) -> bytes:
    """Write numbers."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


# Quiescence: rank 0 is the coordinator, and the attacked.
register(
    "verdict",
    "The end's verdict, of a worker that does not coordinate",
    Kind.QUIET_VERDICT,
    words(0, 1),
    REFUSED,
)
register("verdict_empty", "A verdict without words", Kind.QUIET_VERDICT, b"", REFUSED)
register("verdict_odd", "A verdict of seven bytes", Kind.QUIET_VERDICT, b"\0" * 7, REFUSED)
register("report_empty", "A report without words", Kind.QUIET_REPORT, b"", REFUSED)
register("report_short", "A report of one count", Kind.QUIET_REPORT, words(0, 1), REFUSED)
register("report_long", "A report of nine counts", Kind.QUIET_REPORT, words(0, *range(9)), REFUSED)
register("report_odd", "A report of 41 bytes", Kind.QUIET_REPORT, b"\0" * 41, REFUSED)

# References.
register("fork_odd", "A fork without its number", Kind.RREF_FORK, words(0, 1), REFUSED)
register("fork_cut_off", "Forks that are cut off", Kind.RREF_FORK, b"\0" * 23, REFUSED)
register("delete_odd", "A delete without its number", Kind.RREF_USER_DELETE, words(1), REFUSED)
register("delete_cut_off", "Deletes that are cut off", Kind.RREF_USER_DELETE, b"\0" * 3, REFUSED)
register(
    "delete_unknown", "A delete of what is not there", Kind.RREF_USER_DELETE, words(_FAR, _FAR), ""
)

# Distributed autograd.
register("notice_empty", "A notice without content", Kind.AUTOGRAD_NOTICE, b"", REFUSED)
register("notice_int", "A notice that is an int", Kind.AUTOGRAD_NOTICE, encode(1), REFUSED)
register("notice_short", "A notice of one field", Kind.AUTOGRAD_NOTICE, encode([1]), REFUSED)
register(
    "notice_unknown", "A notice that there is not", Kind.AUTOGRAD_NOTICE, encode([99, 1]), REFUSED
)
register(
    "notice_text",
    "A notice whose kind is a text",
    Kind.AUTOGRAD_NOTICE,
    encode(["eval", 1]),
    REFUSED,
)
register(
    "done_text",
    "DONE of a pass that is a text",
    Kind.AUTOGRAD_NOTICE,
    encode([1, 1, "x", "y"]),
    REFUSED,
)
register(
    "failed_error",
    "FAILED with what is no error",
    Kind.AUTOGRAD_NOTICE,
    encode([2, 1, 1, 5]),
    REFUSED,
)
register(
    "stop_fields", "STOP of five fields", Kind.AUTOGRAD_NOTICE, encode([3, 1, 2, 3, 4]), REFUSED
)
register(
    "summary_forged",
    "SUMMARY with hops that are texts",
    Kind.AUTOGRAD_NOTICE,
    encode([5, 1, 1, {"x": "y"}, "z"]),
    REFUSED,
)
register(
    "await_unknown",
    "AWAIT of sends that are not there",
    Kind.AUTOGRAD_NOTICE,
    encode([6, 1, 1, True, [1, 2]]),
    REFUSED,
)
register(
    "report_text",
    "REPORT with texts in the place of ranks",
    Kind.AUTOGRAD_NOTICE,
    encode([8, 1, 1, "s", 1, ["x"]]),
    REFUSED,
)
register(
    "clean_up_text",
    "CLEANUP of a context that is a list",
    Kind.AUTOGRAD_NOTICE,
    encode([9, []]),
    REFUSED,
)
register("notice_damaged", "A notice that is no data", Kind.AUTOGRAD_NOTICE, b"\xc1", REFUSED)
register("gradients_empty", "Gradients without words", Kind.GRADIENTS, b"", REFUSED)
register("gradients_cut_off", "Gradients that are cut off", Kind.GRADIENTS, b"\0" * 10, REFUSED)
register(
    "gradients_text",
    "Gradients that are texts",
    Kind.GRADIENTS,
    GRADIENTS.pack(1, 1, 1, 0) + encode(["x"]),
    "",
)
register(
    "gradients_unknown",
    "Gradients of a context that there is not, for a worker that there is not",
    Kind.GRADIENTS,
    GRADIENTS.pack(1, _FAR, 1, 0) + b"\xc0",
    REFUSED,
)
register(
    "back_empty", "Gradients of a request, without words", Kind.REQUEST_GRADIENTS, b"", REFUSED
)


@attack("A fetch without a number", "FrameError")
def fetch_nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.RREF_FETCH, b"\0")


@attack("A backward pass without fields", "FrameError|ValueError|TypeError")
def backward_nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.BACKWARD_AUTOGRAD, b"")


@attack("A backward pass of what is no reference", "FrameError|ValueError|TypeError")
def backward_no_reference(attacker: Attacker) -> object:
    return attacker.request(Kind.BACKWARD_AUTOGRAD, encode([1, 2, True, "fast"]))


def gathering(number: int, joined: str, generation: int | None = None) -> str:
    """Return the id of a gathering."""
    return f"{current.require().generation if generation is None else generation}:{number}:{joined}"


def part(
    name: str, idea: str, sequence_id: Callable[[], str], giver: str, names: set[str], reason: str
) -> None:
    """Register an attack by an object for a gathering that does not exist."""

    def run(attacker: Attacker) -> object:
        rpc.rpc_sync(
            attacker.to, gather_to_leader, args=(sequence_id(), giver, b"x", names), timeout=5
        )
        return "kept"

    run.__name__ = name
    attack(idea, f"refused: .*{reason}")(run)


BOTH = {"worker0", "worker1"}
JOINED = "worker0 worker1"
part(
    "part_of_another",
    "A part in the name of another",
    lambda: gathering(0, JOINED),
    "worker0",
    BOTH,
    "comes from worker1",
)
part(
    "part_far_ahead",
    "A part of a gathering far ahead",
    lambda: gathering(64, JOINED),
    "worker1",
    BOTH,
    "too far ahead",
)
part(
    "part_of_other_names",
    "A part with other names",
    lambda: gathering(0, JOINED),
    "worker1",
    {"worker1"},
    "names are others",
)
part("part_no_id", "A part of anything", lambda: "1", "worker1", BOTH, "no sequence id")
part(
    "part_long_id",
    "A part of a number of many digits",
    lambda: f"0:{'9' * 5000}:{JOINED}",
    "worker1",
    BOTH,
    "no sequence id",
)
part(
    "part_unordered",
    "Names that are not in order",
    lambda: gathering(0, "worker1 worker0"),
    "worker1",
    BOTH,
    "not in order",
)
part(
    "part_of_others",
    "A gathering without the receiver",
    lambda: gathering(0, "worker1"),
    "worker1",
    {"worker1"},
    "no part",
)
part(
    "part_earlier",
    "A part of an earlier init_rpc",
    lambda: gathering(0, JOINED, 10**9),
    "worker1",
    BOTH,
    "of init_rpc",
)
part(
    "part_without_sender",
    "A gathering without the sender",
    lambda: gathering(0, "worker0"),
    "worker1",
    {"worker0"},
    "no part",
)


@attack("Parts of a gathering with a worker that there is not", "could not find destination")
def part_of_nobody(attacker: Attacker) -> object:
    names = {"worker0", "worker1", "nobody"}
    sequence_id = gathering(0, "nobody worker0 worker1")
    rpc.rpc_sync(
        attacker.to, gather_to_leader, args=(sequence_id, "worker1", b"x", names), timeout=5
    )
    return "kept"


@attack("The parts of all, from a worker that does not lead", "refused: .*does not lead")
def told_by_follower(attacker: Attacker) -> object:
    rpc.rpc_sync(
        attacker.to,
        broadcast_to_follower,
        args=(gathering(0, JOINED), dict.fromkeys(BOTH)),
        timeout=5,
    )
    return "kept"


@attack(
    "Parts of all gatherings that a worker may be ahead of, and more",
    "refused: .*too far ahead",
    ranks=3,
)
def parts_ahead(attacker: Attacker) -> object:
    for number in range(80):
        for joined in (JOINED, f"{JOINED} worker2"):
            sequence_id, names = gathering(number, joined), set(joined.split())
            rpc.rpc_sync(
                attacker.to, gather_to_leader, args=(sequence_id, "worker1", b"x", names), timeout=5
            )
    return "kept"


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
        attacker.call(
            "tests.rpc.attacks.victim:echo",
            array(encode(1)),
            kind=Kind.REMOTE_PYTHON,
            prefix=prefix,
        )
    except Exception:
        pass
    assert box.rpc_sync(timeout=5).get() == 7, "another call has taken the place of a value"


@attack(
    "A call whose result would take the place of a value of the worker's own",
    "which it has not made",
)
def value_replaced(attacker: Attacker) -> object:
    own = attacker.ask(victim.shared)
    prefix = PAIR.pack(own._reference, attacker.agent.references.store.make_id())
    try:
        return attacker.call(
            "tests.rpc.attacks.victim:echo",
            array(encode("mine")),
            kind=Kind.REMOTE_PYTHON,
            prefix=prefix,
        )
    finally:
        assert own.to_here(timeout=5) == "a value of its own"


@attack("A fork that another has made", "which it has not made")
def fork_of_another(attacker: Attacker) -> None:
    attacker.send(Kind.RREF_FORK, words(0, 1, 1))


@attack("A method without a name", "may not be called|not in the list")
def unnamed_method(attacker: Attacker) -> object:
    box = rpc.remote(attacker.to, victim.Box, args=(7,))
    box._get_future().wait()
    header = pack_references([box.fork(attacker.to)]) + b"\0\0" + array(reference(0))
    return attacker.request(Kind.CALL_METHOD, header, flags=REFERENCES)


@attack("A method of another worker's value", "RRefError|can't call localValue", ranks=3)
def method_of_others(attacker: Attacker) -> object:
    header = (
        pack_references([(1, attacker.agent.references.store.make_id(), 2)])
        + b"\3\0get"
        + array(reference(0))
    )
    return attacker.request(Kind.CALL_METHOD, header, flags=REFERENCES)
