"""Attacks by answers to the victim's calls: wrong kinds, hostile contents, wrong senders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mpidist.rpc as rpc
from mpidist.comm.serialization.data_format import TUPLE
from mpidist.comm.serialization.tensor_format import COUNTS
from mpidist.rpc import current
from mpidist.rpc.message import FAR, REFERENCES, Kind, pack_references
from mpidist.rpc.threads.pool import HANDLED, Task
from mpidist.rpc.values.codec import PICKLED, TABLE
from mpidist.rpc.values.data_values import ERROR, NAMED, RECORD
from tests.rpc.attacks import victim
from tests.rpc.attacks.attacker import WAIT_S, Attacker, Attacks
from tests.rpc.attacks.data import (
    CANARY,
    NO_ARGUMENTS,
    VICTIM,
    Written,
    array,
    encode,
    ext,
    own,
    reference,
)
from tests.rpc.attacks.opcodes import called, named, plain, whole

attack = Attacks()

DAMAGED = "FrameError"
DATA_ONLY = "data only"
REFUSED = "not in the list|cannot be raised here|FrameError"
FIRE = whole(called(named(CANARY, "fire"), plain("answer")))


@contextlib.contextmanager
def replies(reply: Callable[[Attacker, Any], None], attacker: Attacker) -> Iterator[None]:
    """Answer calls to this process in place of its agent."""
    agent = attacker.agent
    handlers = agent.dispatcher._handlers
    before = list(handlers)

    def take(incoming: Any) -> Any:
        incoming.action = None
        agent.wire.count_answer()
        reply(attacker, incoming)
        return HANDLED

    for kind in (Kind.CALL_PYTHON, Kind.REMOTE_PYTHON, Kind.RREF_FETCH):
        handlers[kind] = take
    try:
        yield
    finally:
        handlers[:] = before


def result_of(attacker: Attacker, function: Any) -> object:
    """Have the attacked worker call this process; raise what that call raised there."""
    is_refused, text = attacker.ask(function, attacker.agent.workers.me.id)
    if is_refused:
        raise RuntimeError(text)
    return text


def register(
    name: str,
    idea: str,
    kind: int,
    header: bytes = b"",
    *,
    flags: int = 0,
    parts: tuple[bytes, ...] = (),
    reason: str = DAMAGED,
) -> None:
    """Note an attack: this answer to a call of the attacked worker."""

    def run(attacker: Attacker) -> object:
        def reply(attacker: Attacker, incoming: Any) -> None:
            attacker.send(kind, header, flags=flags, parts=parts, sequence=incoming.sequence)

        with replies(reply, attacker):
            return result_of(attacker, victim.asked)

    run.__name__ = name
    attack(idea, reason)(run)


def description(content: Any, *texts: Any) -> bytes:
    """Write an exception as answers have it."""
    values = [Written(encode(text)) for text in texts or ("Error", "Error: text", "traceback")]
    return own(TUPLE, *values, Written(content if type(content) is bytes else encode(content)))


def error_of(name: str) -> bytes:
    """Write an answer with an exception of a class."""
    return description(
        ext(TUPLE, array(encode(name), encode("text"), NO_ARGUMENTS.data, encode({})))
    )


register("pickle", "A pickle is the result", Kind.RESULT, FIRE, flags=PICKLED, reason=DATA_ONLY)
register(
    "pickle_far",
    "A pickle is the result, in a part",
    Kind.RESULT,
    flags=PICKLED | FAR,
    parts=(FIRE,),
    reason=DATA_ONLY,
)
register(
    "pickle_error",
    "A pickle is the exception",
    Kind.EXCEPTION,
    FIRE,
    flags=PICKLED,
    reason=DATA_ONLY,
)
register(
    "pickle_within",
    "An exception whose content is a pickle, as workers without a list send it",
    Kind.EXCEPTION,
    description(encode(FIRE)),
    reason=REFUSED,
)
for _name, _class in {
    "exit": "builtins:SystemExit",
    "interrupt": "builtins:KeyboardInterrupt",
    "function": "builtins:eval",
    "canary": f"{CANARY}:Bird",
    "fire": f"{CANARY}:fire",
    "dotted": "builtins:ValueError.__subclasses__",
}.items():
    register(
        f"error_{_name}",
        f"An exception by the name {_class}",
        Kind.EXCEPTION,
        error_of(_class),
        reason=REFUSED,
    )
register("error_number", "An exception that is a number", Kind.EXCEPTION, encode(5))
register("error_nothing", "An exception that is nothing", Kind.EXCEPTION)
register(
    "error_texts",
    "An exception whose texts are numbers",
    Kind.EXCEPTION,
    description(None, 1, 2, 3),
)
register("error_fields", "An exception of two fields", Kind.EXCEPTION, own(TUPLE, "a", "b"))
register("error_list", "An exception that is a list", Kind.EXCEPTION, encode(["a", "b", "c", None]))
register("damaged", "A result that is no data", Kind.RESULT, b"\xc1")
register("behind", "Bytes behind a result", Kind.RESULT, b"\xc0\xc0")
register(
    "unlisted",
    "A result that names what is not listed",
    Kind.RESULT,
    own(NAMED, f"{CANARY}:fire"),
    reason=REFUSED,
)
register(
    "record",
    "A result of an unlisted record",
    Kind.RESULT,
    own(RECORD, f"{VICTIM}:Unlisted", 1),
    reason=REFUSED,
)
register(
    "error_as_result",
    "A result that is an exception of no class",
    Kind.RESULT,
    own(ERROR, "a:b", "", NO_ARGUMENTS, {}),
    reason=REFUSED,
)
register(
    "table",
    "A result whose table is damaged",
    Kind.RESULT,
    COUNTS.pack(1, 1) + b"\0" * 8,
    flags=TABLE,
)
register("reference", "A result with a reference that did not come", Kind.RESULT, reference(0))
register(
    "owner",
    "A result with a reference whose owner is no worker",
    Kind.RESULT,
    pack_references([(1, 2, 99)]) + reference(0),
    flags=REFERENCES,
)
register(
    "owners_cut_off",
    "A result whose references are cut off",
    Kind.RESULT,
    b"\xff\xff",
    flags=REFERENCES,
)
register("far_nothing", "A result in a part that did not come", Kind.RESULT, flags=FAR)
register(
    "unknown_kind", "An answer of a kind that there is not", 40, encode(1), reason="unknown kind"
)


@attack("A fetch answered with a pickle", DATA_ONLY)
def fetch_pickle(attacker: Attacker) -> object:
    def reply(attacker: Attacker, incoming: Any) -> None:
        is_fetch = incoming.kind == Kind.RREF_FETCH
        kind, data, flags = (Kind.RESULT, FIRE, PICKLED) if is_fetch else (Kind.REMOTE_DONE, b"", 0)
        attacker.send(kind, data, flags=flags, sequence=incoming.sequence)

    with replies(reply, attacker):
        return result_of(attacker, victim.fetched)


@attack("A value's creation that failed with a pickle", DATA_ONLY)
def creation_pickle(attacker: Attacker) -> object:
    def reply(attacker: Attacker, incoming: Any) -> None:
        attacker.send(Kind.EXCEPTION, FIRE, flags=PICKLED, sequence=incoming.sequence)

    with replies(reply, attacker):
        return result_of(attacker, victim.fetched)


@attack("Two answers to one call: the second is nobody's", "")
def twice(attacker: Attacker) -> None:
    def reply(attacker: Attacker, incoming: Any) -> None:
        attacker.send(Kind.RESULT, encode([1]), sequence=incoming.sequence)
        attacker.send(Kind.EXCEPTION, FIRE, flags=PICKLED, sequence=incoming.sequence)

    with replies(reply, attacker):
        assert result_of(attacker, victim.asked) == "[1]"


@attack("Answers to nobody, of every kind and with hostile contents", "")
def to_nobody(attacker: Attacker) -> None:
    for kind in (Kind.RESULT, Kind.REMOTE_DONE, Kind.EXCEPTION):
        for number in (0, 1, 1 << 63, (1 << 64) - 1):
            attacker.send(kind, FIRE, flags=PICKLED, sequence=number)


def _forge(to: int, numbers: range) -> None:
    """Answer calls that a worker has made to another one."""
    transport = current.require().dispatcher._transport
    for number in numbers:
        transport.send(to, Kind.RESULT, number, 0, 0, encode(["forged"]))


@attack("An answer of a worker that was not asked", "", ranks=3)
def of_another(attacker: Attacker) -> None:
    def reply(attacker: Attacker, incoming: Any) -> None:
        rpc.rpc_sync(
            2,
            _forge,
            args=(attacker.to, range(incoming.sequence, incoming.sequence + 1)),
            timeout=WAIT_S,
        )
        attacker.send(Kind.RESULT, encode(["true"]), sequence=incoming.sequence)

    # The reply waits for another worker, so it must not run on the polling thread.
    def later(attacker: Attacker, incoming: Any) -> None:
        attacker.agent.polling.pool.submit(Task(lambda: reply(attacker, incoming)))

    with replies(later, attacker):
        answer = result_of(attacker, victim.asked)
    assert answer == "['true']", f"the answer of another worker was taken: {answer}"
