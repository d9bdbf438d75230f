"""Messages that run code or end a worker where they are believed, to a worker with a list.

Rank 1 sends them, below the public calls; rank 0 has the list, and coordinates the shutdown. Each
is refused with its reason, nothing runs that is not listed, and the worker answers the next call.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import re
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

import mpidist.autograd  # noqa: F401  # registers the engine that some messages are for
import mpidist.rpc as rpc
from mpidist.comm.mpi.library import MPI
from mpidist.comm.serialization import frame
from mpidist.comm.serialization.data_format import (
    DEVICE,
    DTYPE,
    FROZENSET,
    INTEGER,
    OBJECT,
    OBJECTS,
    SCALAR,
    TUPLE,
)
from mpidist.comm.serialization.tensor_format import COUNTS
from mpidist.errors import MpidistError
from mpidist.rpc import current, membership
from mpidist.rpc.calls import engine_messages
from mpidist.rpc.message import (
    ANNOUNCED,
    AUTOGRAD,
    COUNT,
    FAR,
    GRADIENTS,
    PAIR,
    REFERENCES,
    Kind,
    pack_references,
)
from mpidist.rpc.rref import Proxy
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.call import Call
from mpidist.rpc.threads.pool import HANDLED
from mpidist.rpc.values.codec import KEYWORDS, LONE_ARGUMENT, PICKLED, PLAIN, TABLE
from mpidist.rpc.values.data_values import NAMED, REFERENCE, REGISTERED, WORKER
from tests.comm.serialization import forged_tables
from tests.rpc import hostile
from tests.rpc.hostile import ECHO, TOUCHED, Box, array, encode, ext, own
from tests.tools.support import agree

ATTACKER, ATTACKED = 1, 0
WAIT_S, LOG_S = 5.0, 1.5
_COUNTED = frozenset({Kind.RREF_FORK, Kind.RREF_USER_DELETE}) | engine_messages.KINDS
_EAGER = struct.Struct("<BBHIQQII")
_ALL_PAYLOADS = 1 << 15
_numbers = itertools.count(1 << 40)  # of calls; the agent's own begin with 1

DATA_ONLY = "data only"
DAMAGED = "FrameError|refused a message"
UNLISTED = "may not be called|may not be named"
HERE = "tests.rpc.hostile"

Send = Callable[[], Any]  # sends a message; raises what the worker answers
CASES: dict[str, tuple[Send, str]] = {}  # the sender, and a pattern of the answer or the log


def send(
    kind: int,
    header: bytes = b"",
    flags: int = 0,
    parts: Sequence[Any] = (),
    sequence: int = 0,
) -> None:
    """Send a message as it is."""
    agent = current.require()
    if kind in _COUNTED:
        # As an honest sender counts them: else the end would wait for messages never sent.
        agent.wire.one_way_sent += 1
    agent.dispatcher._transport.send(ATTACKED, kind, sequence, 0, flags, header, parts)


def request(kind: int, header: bytes = b"", flags: int = 0, parts: Sequence[Any] = ()) -> Any:
    """Send a request and return what its answer holds, or raise it."""
    calls = current.require().calls
    call = Call(ATTACKED, "an attack", WAIT_S)
    call.sequence = next(_numbers)
    calls._pending[call.sequence] = call
    calls._next_deadline = min(calls._next_deadline, call.deadline)
    send(kind, header, flags, parts, call.sequence)
    return calls.result(call)


def call(
    name: str | bytes,
    content: bytes = b"",
    kind: int = Kind.CALL_PYTHON,
    flags: int = 0,
    parts: Sequence[Any] = (),
    prefix: bytes = b"",
) -> Send:
    """Return the sender of a call by name."""
    encoded = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
    header = prefix + COUNT.pack(len(encoded)) + encoded + content
    return lambda: request(kind, header, flags, parts)


def item(data: bytes) -> Send:
    """Return the sender of a call with one argument."""
    body = array(data)
    return call(ECHO, b"", flags=FAR, parts=[body]) if len(body) > 8000 else call(ECHO, body)


def tensors(rows: Sequence[bytes], parts: Sequence[bytes]) -> Send:
    """Return the sender of a call with the first tensor of a table."""
    body = COUNTS.pack(len(rows), len(parts)) + b"".join(rows) + LONE_ARGUMENT
    return call(TOUCHED, body, flags=TABLE, parts=[bytearray(part) for part in parts])


def notice(kind: int, header: bytes, flags: int = 0) -> Send:
    """Return the sender of a one-way message."""
    return lambda: send(kind, header, flags)


def raw(
    rest: bytes = b"", *sent: bytes, payloads: int = 0, header: int = 0, packed: int = 0
) -> Send:
    """Return the sender of an eager message past our transport; the numbers are announced."""

    def run() -> None:
        transport = current.require().dispatcher._transport
        fixed = _EAGER.pack(
            Kind.CALL_PYTHON, FAR, payloads, transport.generation, 1 << 44, 0, header, packed
        )
        requests = [transport._mpi.Isend([fixed + rest, MPI.BYTE], ATTACKED, transport._eager_tag)]
        for payload in sent:
            message = [payload, MPI.BYTE]
            requests.append(transport._mpi.Isend(message, ATTACKED, transport._payload_tag))
        for each in requests:
            each.Wait()

    return run


def method(make: Callable[..., Any], name: str, *args: Any) -> Send:
    """Return the caller of a method of a value that the worker has made."""
    # Not getattr: the proxy has dunders of its own.
    return lambda: Proxy.__getattr__(
        rpc.remote(ATTACKED, make, args=args).rpc_sync(timeout=WAIT_S), name
    )()


def answer(kind: int, header: bytes = b"", flags: int = 0, parts: Sequence[bytes] = ()) -> Send:
    """Return a sender that answers a call of the worker in place of this process's agent."""

    def run() -> object:
        agent = current.require()
        handlers = agent.dispatcher._handlers
        before = list(handlers)

        def take(incoming: Any) -> Any:
            incoming.action = None
            agent.wire.count_answer()
            send(kind, header, flags, parts, incoming.sequence)
            return HANDLED

        handlers[Kind.CALL_PYTHON] = take
        try:
            is_refused, text = rpc.rpc_sync(
                ATTACKED, hostile.asked, args=(ATTACKER,), timeout=WAIT_S
            )
        finally:
            handlers[:] = before
        if is_refused:
            raise RuntimeError(text)
        return text

    return run


def described(name: str, *arguments: Any) -> bytes:
    """Write an answer with an exception of a class."""
    content = ext(TUPLE, array(encode(name), ext(TUPLE, array(*map(encode, arguments))), b"\x80"))
    texts = map(encode, ("Error", "Error: text", "traceback"))
    return ext(TUPLE, array(*texts, content))


def nested(code: int, levels: int) -> bytes:
    """Write extension types within each other."""
    data = b"\x90"
    for _ in range(levels):
        data = array(ext(code, data))
    return data


def add(reason: str, **cases: Send) -> None:
    """Note cases by name."""
    for name, run in cases.items():
        assert name not in CASES
        CASES[name] = run, reason


# Pickles, by each way into the worker. None is read, whatever its opcodes.
PICKLE = pickle.dumps(((hostile.Bomb(),), {}))
LONE = pickle.dumps(hostile.Bomb())
add(
    DATA_ONLY,
    pickle_argument=call(ECHO, PICKLE, flags=PICKLED),
    pickle_unnamed=call("", pickle.dumps((hostile.fire, (), {})), flags=PICKLED),
    pickle_far=call(ECHO, b"", flags=PICKLED | FAR, parts=[PICKLE]),
    pickle_payload=call(ECHO, b"", flags=PICKLED | FAR, parts=[PICKLE + bytes(100_000)]),
    pickle_operator=call("torch.add", PICKLE, Kind.CALL_BUILTIN, PICKLED),
    pickle_remote=call(
        ECHO,
        PICKLE,
        Kind.REMOTE_PYTHON,
        PICKLED,
        prefix=PAIR.pack(1 << 40 | 1 << 20, 1 << 40 | 1 << 20 | 1),
    ),
    pickle_backward=lambda: request(Kind.BACKWARD_AUTOGRAD, LONE, PICKLED),
    pickle_notice=notice(Kind.AUTOGRAD_NOTICE, LONE, PICKLED),
    pickle_gradient=notice(Kind.GRADIENTS, GRADIENTS.pack(1, 1, 1, 0) + LONE, PICKLED),
    pickle_result=answer(Kind.RESULT, LONE, PICKLED),
    pickle_result_far=answer(Kind.RESULT, b"", PICKLED | FAR, [LONE]),
    pickle_exception=answer(Kind.EXCEPTION, LONE, PICKLED),
)
add(
    "cannot be raised here",
    pickle_described=answer(
        Kind.EXCEPTION, ext(TUPLE, array(*map(encode, ("Error", "text", "traceback", LONE))))
    ),
    # CPython 3.11 reads the object of a UnicodeDecodeError at whatever start it was given.
    error_far=answer(
        Kind.EXCEPTION,
        described("builtins:UnicodeDecodeError", "utf8", b"abc", -(1 << 50), 1 - (1 << 50), "x"),
    ),
    **{
        f"error_{number}": answer(Kind.EXCEPTION, described(name, "x"))
        for number, name in enumerate(
            (
                "builtins:SystemExit",
                "builtins:KeyboardInterrupt",
                "builtins:eval",
                "builtins:ValueError.__subclasses__",
                f"{HERE}:Bird",
                f"{HERE}:fire",
            )
        )
    },
)

# Names of functions.
for _kind, _names in {
    Kind.CALL_PYTHON: (
        *("os:system", "posix:system", "builtins:eval", "builtins:exec", "builtins:getattr"),
        *("importlib:import_module", f"{HERE}:fire", f"{HERE}:Bird", f"{HERE}:log.close"),
        *(f"{HERE}:look.{name}" for name in ("__globals__.clear", "__call__", "__class__")),
        *(f"{HERE}:look.{name}" for name in ("__get__", "__builtins__.get")),
        *(f"{HERE}:Box.{name}" for name in ("_hidden", "inherited", "__init__", "__new__", "mro")),
        *(f"{HERE}:Box.{name}" for name in ("get.__globals__.clear", "__base__.__subclasses__")),
        *(f"{HERE}:Box.{name}" for name in ("__setattr__", "__reduce__", "price.fget")),
        *("mpidist.rpc.serving.methods:call_method", "mpidist.rpc.current:require"),
        *("mpidist.rpc.worker_gather:put_part", "mpidist.rpc.api:shutdown"),
        *("mpidist.rpc.names.allowlist:Allowed", "mpidist.rpc.worker:WorkerInfo"),
        *("mpidist.optim.local:make", "mpidist.nn.remote:execute"),
        *("mpidist.rpc.values.pickles:_script_module", "aten::mul", ":look", f"{HERE}:", ":"),
        *(f"{HERE}:l\u043eok", f"{HERE}:\uff4cook", f"{HERE}:look\0", f"{HERE}:look "),
        *(
            f"{HERE}.look",
            f"{HERE}::look",
            f"{HERE}:look:",
            "__main__:__builtins__",
            ".hostile:look",
        ),
        *(f"{HERE}:" + "a" * 30_000, f"{HERE}:look" + ".x" * 10_000, f"{HERE}:look\udc80"),
    ),
    Kind.CALL_BUILTIN: (
        *("aten::add.__class__", "aten::__init__", "torch.add.__call__", "aten::mul", "torch.mul"),
        *("torch.load", "torch.hub.load", "torch.ops", "torch._C", "torch.ops.load_library"),
        *("prim::Print", "aten::", "aten::set_.source_Storage_storage_offset", f"{HERE}:look"),
    ),
    Kind.CALL_SCRIPT: ("__torch__.nothing", f"__torch__.{HERE}.Box", f"{HERE}.look"),
}.items():
    add(
        UNLISTED,
        **{f"name_{_kind.name}_{n}": call(one, kind=_kind) for n, one in enumerate(_names)},
    )
add(
    UNLISTED,
    **{
        f"method_{name!r}": method(Box, name)
        for name in (
            *("price", "_hidden", "inherited", "value", "nothing", "get.__globals__", "get\0"),
            *("__class__", "__init__", "__reduce__", "__getattribute__", "__setattr__", "__dict__"),
            *("__subclasshook__", "__call__", "g\u0435t"),
        )
    },
    **{
        f"unlisted_{name}": method(hostile.bird, name)
        for name in ("sing", "song", "whatever", "__call__")
    },
    of_tuple=method(hostile.echo, "count", 1),
    of_string=method(hostile.shared, "local_value"),
    no_text=call(b"\xff\xff:\x80"),
    named_function=item(own(NAMED, f"{HERE}:fire")),
    named_system=item(own(NAMED, "posix:system")),
    named_dotted=item(own(NAMED, f"{HERE}:Box.get.__globals__")),
    named_module=item(own(NAMED, HERE)),
)
add(
    "no service|without a function's name|importable name|data only",
    unnamed=call("", b"\x90"),
    service=call("mpidist.rpc.current:require", array(), Kind.CALL_SERVICE),
    service_listed=call(f"{HERE}:look", array(), Kind.CALL_SERVICE),
    service_unnamed=call("", array(), Kind.CALL_SERVICE),
)
add(
    "reference|TypeError|FrameError",
    method_of_data=call("get", array(encode(5)), Kind.CALL_METHOD),
    method_unnamed=call("", array(encode(5)), Kind.CALL_METHOD),
    method_of_nothing=call("get", array(), Kind.CALL_METHOD),
    method_of_dict=call("get", array(encode({"local_value": 1})), Kind.CALL_METHOD),
)

# Data that claims more than there is, names types that are none, or is no data.
add(
    "FrameError|TypeError|ValueError|Refused|MpidistError",
    data_unused_byte=item(b"\xc1"),
    data_array=item(b"\xdd\xff\xff\xff\xff"),
    data_map=item(b"\xdf\xff\xff\xff\xff"),
    data_text=item(b"\xdb\xff\xff\xff\xff"),
    data_bytes=item(b"\xc6\xff\xff\xff\xff"),
    data_extension=item(ext(INTEGER, b"", 0xFFFFFFFF)),
    data_arrays=item(b"\xdd\xff\xff\xff\xff" * 1500),
    data_deep=item(b"\x91" * 100_000 + b"\xc0"),
    data_deep_maps=item(b"\x81\xc0" * 100_000 + b"\xc0"),
    data_deep_tuples=item(nested(TUPLE, 1000)),
    data_deep_sets=item(nested(FROZENSET, 1000)),
    data_behind=call(ECHO, array(b"\xc0") + b"\xc0"),
    data_marshalled=call(ECHO, b"\xa9\x01\xe9\x01\0\0\0"),
    data_map_for_arguments=call(ECHO, b"\x80"),
    data_timestamp=item(ext(-1, struct.pack(">Iq", 0, 1 << 62))),
    data_code=item(ext(99, array())),
    data_object=item(ext(OBJECT, struct.pack("<I", 0xFFFFFFFF))),
    data_objects=item(ext(OBJECTS, b"\0\0\0\0\xff\xff\xff\xff")),
    data_scalar_object=item(own(SCALAR, "object", b"\1" * 8)),
    data_scalar_record=item(own(SCALAR, "O,O", b"\1" * 16)),
    data_scalar_short=item(own(SCALAR, "float64", bytes(7))),
    data_dtype=item(ext(DTYPE, b"torch.load")),
    data_device=item(own(DEVICE, "hpu", 0)),
    data_reference=item(ext(REFERENCE, b"\xff" * 4)),
    data_worker=item(own(WORKER, "a", "0")),
    data_registered=item(own(REGISTERED, 99, 1)),
    data_registered_list=item(own(REGISTERED, [])),
    data_module=item(own(REGISTERED, 1, 0, "cpu", None, "eval")),
    data_not_plain=call(ECHO, array(ext(REFERENCE, bytes(4))), flags=PLAIN),
    keywords_many=call(ECHO, encode([["a", "b"], 1]), flags=KEYWORDS),
    keywords_number=call(ECHO, encode([[1], 1]), flags=KEYWORDS),
    keywords_nothing=call(ECHO, encode([]), flags=KEYWORDS),
    answer_no_data=answer(Kind.RESULT, b"\xc1"),
    answer_named=answer(Kind.RESULT, own(NAMED, f"{HERE}:fire")),
    answer_number=answer(Kind.EXCEPTION, encode(5)),
    answer_nothing=answer(Kind.EXCEPTION),
    answer_table=answer(Kind.RESULT, COUNTS.pack(1, 1) + bytes(8), TABLE),
    answer_owner=answer(
        Kind.RESULT, pack_references([(1, 2, 99)]) + ext(REFERENCE, bytes(4)), REFERENCES
    ),
)

# Tables of tensors that lead beyond their memory.
add(
    DAMAGED,
    **{
        f"tensor_{name}_{number}": tensors(*case)
        for table in (forged_tables.REFUSED, forged_tables.REFUSED_IF_STRICT)
        for name, cases in table.items()
        for number, case in enumerate(cases)
    },
    tensor_no_table=call(TOUCHED, b"\0", flags=TABLE),
    tensor_rows_announced=call(TOUCHED, COUNTS.pack((1 << 32) - 1, 0) + LONE_ARGUMENT, flags=TABLE),
    tensor_no_rows=call(TOUCHED, COUNTS.pack(0, 0) + LONE_ARGUMENT, flags=TABLE),
)

# Headers, counts and control messages that are cut off, or about what is not there.
add(
    f"{DAMAGED}|cut off|unknown kind|without a function's name",
    header_flags=call(ECHO, bytes(64), flags=255),
    header_name=lambda: request(Kind.CALL_PYTHON, COUNT.pack(65535) + b"os:system"),
    header_no_name=lambda: request(Kind.CALL_PYTHON, b"\1"),
    header_remote=lambda: request(Kind.REMOTE_PYTHON, b"\1\2\3"),
    header_references=lambda: request(Kind.CALL_PYTHON, b"\xff\xff", REFERENCES),
    header_announced=call(ECHO, b"", flags=ANNOUNCED | FAR, parts=[b"\xff\xff\xff\xff"]),
    header_autograd=lambda: request(Kind.CALL_PYTHON, b"\0\0\0", AUTOGRAD),
    header_no_content=call(TOUCHED, b"", flags=FAR),
    header_owner=lambda: request(
        Kind.CALL_PYTHON,
        pack_references([(1, 2, 77)]) + COUNT.pack(len(ECHO)) + ECHO.encode() + array(),
        REFERENCES,
    ),
    fetch=lambda: request(Kind.RREF_FETCH, b"\0"),
    kind_of_request=lambda: request(31, bytes(8)),
    kind_of_notice=notice(255, bytes(8)),
    kind_of_answer=answer(40, encode(1)),
    verdict=notice(Kind.QUIET_VERDICT, struct.pack("<2Q", 0, 1)),
    verdict_odd=notice(Kind.QUIET_VERDICT, bytes(7)),
    report=notice(Kind.QUIET_REPORT, bytes(16)),
    report_odd=notice(Kind.QUIET_REPORT, bytes(41)),
    fork=notice(Kind.RREF_FORK, bytes(23)),
    delete=notice(Kind.RREF_USER_DELETE, bytes(3)),
    gradients=notice(Kind.GRADIENTS, bytes(10)),
    gradients_far=notice(Kind.GRADIENTS, GRADIENTS.pack(1, (1 << 64) - 1, 1, 0) + b"\xc0"),
    gradients_back=notice(Kind.REQUEST_GRADIENTS, b""),
    **{
        f"autograd_{number}": notice(Kind.AUTOGRAD_NOTICE, data)
        for number, data in enumerate(
            (
                *(b"", b"\xc1"),
                *map(
                    encode,
                    (
                        *(1, [1], [99, 1], ["eval", 1], [1, 1, "x", "y"], [2, 1, 1, 5]),
                        *([3, 1, 2, 3, 4], [5, 1, 1, {"x": "y"}, "z"], [6, 1, 1, True, [1, 2]]),
                        *([8, 1, 1, "s", 1, ["x"]], [9, []]),
                    ),
                ),
            )
        )
    },
)

add(
    "",
    header_number=lambda: send(
        Kind.CALL_PYTHON, COUNT.pack(len(ECHO)) + ECHO.encode(), sequence=(1 << 64) - 1
    ),
    answer_to_nobody=lambda: send(Kind.RESULT, LONE, PICKLED, sequence=(1 << 64) - 1),
)

# Last, because the payloads of the sender cannot be assigned to messages any more.
NAME = COUNT.pack(len(ECHO)) + ECHO.encode()
add(
    DAMAGED,
    eager_header=raw(header=0xFFFFFFFF),
    eager_packed=raw(packed=0xFFFFFFFF),
    eager_parts=raw(NAME + b"\xff" * 4, header=len(NAME), packed=4),
    eager_lengths=raw(
        NAME + struct.pack("<IQQ", 2, (1 << 63) - 1, (1 << 63) - 1), header=len(NAME), packed=20
    ),
    eager_long_part=raw(NAME + struct.pack("<IQ", 1, 1000) + b"x", header=len(NAME), packed=13),
    # The rest would be memory of others' messages.
    payload_short=raw(
        struct.pack("<Q", 100_000) + NAME,
        bytes(8),
        payloads=1 | _ALL_PAYLOADS,
        header=len(NAME),
    ),
    payload_device=raw(
        struct.pack("<Q", 8 | 200 << 56) + NAME,
        bytes(8),
        payloads=1 | _ALL_PAYLOADS,
        header=len(NAME),
    ),
    payload_huge=raw(
        struct.pack("<Q", 1 << 50) + NAME, payloads=1 | _ALL_PAYLOADS, header=len(NAME)
    ),
    payloads_announced=raw(payloads=_ALL_PAYLOADS - 1),
)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("claims_data", [False, True])
def test_a_pickle_in_the_exchange_of_init_rpc_is_refused(world, claims_data):
    def forged(obj: Any, *args: Any, **options: Any) -> Any:
        header, body = encoded(hostile.Bomb())
        header = bytearray(header)
        header[6] = int(claims_data)
        return bytes(header), body

    encoded, before, error = frame.encode, list(hostile.fired), None
    is_attacked = world.rank != ATTACKER
    with mock.patch.object(frame, "encode", encoded if is_attacked else forged):
        try:
            rpc.init_rpc(
                f"worker{world.rank}", group=world, allowed=hostile.LISTED if is_attacked else None
            )
        except Exception as raised:
            error = raised
    is_refused = isinstance(error, MpidistError) and current.agent is None
    # The attacker reads its own pickle.
    agree(world, not is_attacked or (is_refused and hostile.fired == before), f"{error!r}")
    if current.agent is not None:
        rpc.shutdown(graceful=False)


@pytest.fixture(scope="module")
def workers(world):
    """Workers for all messages; the attacked alone has a list."""
    logger = logging.getLogger("mpidist")
    logger.addHandler(hostile.log)
    before = interceptor.engine
    interceptor.load()  # other tests of this job may have taken it away
    allowed = hostile.LISTED if world.rank == ATTACKED else None
    rpc.init_rpc(f"worker{world.rank}", group=world, allowed=allowed)
    yield world
    logger.removeHandler(hostile.log)
    rpc.shutdown(timeout=10)
    interceptor.register(before)
    # Payloads of the attacker are received no more by this transport: later tests of this job need
    # another one.
    world.barrier()
    membership._transports.pop(world.world_ranks).close(1)


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """Call a listed function as any worker would."""
    return rpc.rpc_sync(ATTACKED, function, args=args, timeout=WAIT_S)


def complaints(run: Send, reason: str) -> list[str]:
    """Send a message; return what is wrong with how the worker took it."""
    fired, _ = ask(hostile.look)
    wrong, said = [], ""
    try:
        result = run()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        if result is not None:
            wrong.append(f"accepted, with the answer {result!r:.200}")
    deadline = time.monotonic() + LOG_S
    while True:
        now, texts = ask(hostile.look)
        said += "\n".join(texts)
        if re.search(reason, said) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if not re.search(reason, said):
        wrong.append(f"no {reason!r} in the answer or the log: {said}")
    if now != fired:
        wrong.append(f"code ran that is not listed: {now[len(fired) :]}")
    if ask(hostile.echo, 1, "two") != (1, "two"):
        wrong.append("a good call went wrong")
    return wrong


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_message_is_refused(workers, name):
    wrong = complaints(*CASES[name]) if workers.rank == ATTACKER else []
    agree(workers, not wrong, f"{wrong}")
