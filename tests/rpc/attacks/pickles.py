"""Attacks by pickles in place of data: every opcode that creates, calls or changes an object."""

from __future__ import annotations

import struct
from collections.abc import Callable

import mpidist.rpc as rpc
from mpidist.rpc.message import FAR, REFERENCES, Kind, pack_references
from tests.rpc.attacks import victim
from tests.rpc.attacks.attacker import Attacker, Attacks
from tests.rpc.attacks.opcodes import (
    again,
    called,
    dropped,
    items,
    kept,
    mapping,
    named,
    plain,
    text,
    whole,
    with_slots,
)

attack = Attacks()

PICKLE = "data only"  # what each refusal names
CANARY = "tests.rpc.attacks.canary"
VICTIM = "tests.rpc.attacks.victim"


def as_arguments(obj: bytes) -> bytes:
    """A call's pickle that holds an object as its one argument."""
    return whole(items(items(obj), b"}"))


def register(name: str, idea: str, written: Callable[[], bytes]) -> None:
    """Register an attack whose pickle has one argument."""

    def run(attacker: Attacker) -> object:
        return attacker.pickled(as_arguments(written()))

    run.__name__ = name
    attack(idea, PICKLE)(run)


register(
    "reduce",
    "STACK_GLOBAL and REDUCE call a function that is not listed",
    lambda: called(named(CANARY, "fire"), plain("reduce")),
)
register(
    "global_text",
    "GLOBAL, of protocol 0, names it in text",
    lambda: b"ctests.rpc.attacks.canary\nfire\n(tR",
)
register("inst", "INST makes an instance by name", lambda: b"(itests.rpc.attacks.canary\nBird\n")
register(
    "obj",
    "OBJ makes an instance of a class on the stack",
    lambda: b"(" + named(CANARY, "Bird") + b"o",
)
register("newobj", "NEWOBJ calls __new__ of a class", lambda: named(CANARY, "Bird") + b")\x81")
register(
    "newobj_ex", "NEWOBJ_EX calls __new__ with keywords", lambda: named(CANARY, "Bird") + b")}\x92"
)
register(
    "newobj_listed",
    "NEWOBJ makes a listed class without its constructor",
    lambda: named(VICTIM, "Box") + b")\x81",
)
register("extension", "EXT1 names a function by copyreg's table", lambda: b"\x82\x01")
register("persistent", "BINPERSID asks for a persistent object", lambda: plain("x") + b"Q")
register(
    "dotted",
    "A dotted name leads from a listed class to the globals of its module",
    lambda: named(VICTIM, "Box.get.__globals__"),
)
register(
    "imported_there",
    "A dotted name leads from a listed function's module to what it imports",
    lambda: called(named(VICTIM, "canary.fire"), plain("imported")),
)
register(
    "bool_of_eval",
    "builtins.eval is called with a text",
    lambda: called(named("builtins", "eval"), plain("1")),
)
register(
    "system",
    "os.system under the name of its C module",
    lambda: called(named("posix", "system"), plain("true")),
)
register(
    "getattr",
    "operator.attrgetter follows attributes",
    lambda: called(
        called(named("operator", "attrgetter"), plain("__globals__")), named(VICTIM, "look")
    ),
)
register("memo_bomb", "Each level holds the one before ten times", lambda: _doubled(60))
register("deep", "Ten thousand tuples within each other", lambda: b"N" + b"\x85" * 10_000)
register(
    "announced",
    "BINBYTES8 announces 2^62 bytes",
    lambda: b"\x8e" + struct.pack("<Q", 1 << 62) + b"x",
)
register(
    "memo_place",
    "LONG_BINPUT notes under the number 2^32 - 1: a table of 32 GiB",
    lambda: b"Nr" + struct.pack("<I", (1 << 32) - 1),
)
register(
    "long",
    "LONG4 announces 2^31 - 1 bytes of an int",
    lambda: b"\x8b" + struct.pack("<i", (1 << 31) - 1),
)
register("stack", "REDUCE on an empty stack", lambda: b"0R")
register("buffer", "NEXT_BUFFER without a buffer", lambda: b"\x97")
register(
    "object_array",
    "An array of object pointers that the sender chooses: printing it reads them",
    lambda: called(
        named("numpy._core.numeric", "_frombuffer"),
        plain(bytes(range(1, 17))),
        called(named("numpy", "dtype"), plain("O8"), plain(False), plain(True)),
        plain((2,)),
        plain("C"),
    ),
)
register(
    "defaults",
    "BUILD with the state of slots sets a listed function's defaults",
    lambda: _set(named(VICTIM, "look"), "__defaults__"),
)
register(
    "of_class",
    "BUILD with the state of slots sets attributes of a listed class",
    lambda: _set(named(VICTIM, "Box"), "get"),
)
register(
    "of_library",
    "… of a function of this library that every pickle needs",
    lambda: _set(
        named("mpidist.comm.serialization.tensor_pickle", "_with_attributes"), "__defaults__"
    ),
)
register(
    "set_state",
    "BUILD calls __setstate__ of an exception",
    lambda: called(named("builtins", "ValueError"), plain(1)) + b"}b",
)


def _doubled(levels: int) -> bytes:
    made = kept(0, plain([1]))
    for level in range(levels):
        made += kept(
            level + 1, items(again(level), again(level))[0:0] + b"(" + again(level) * 10 + b"t"
        )
    return made


def _set(obj: bytes, name: str) -> bytes:
    return with_slots(obj, **{name: items(plain("set"))})


@attack("A pickle in the place of a function's name calls what it holds", PICKLE)
def unnamed_function(attacker: Attacker) -> object:
    return attacker.pickled(whole(items(named(CANARY, "fire"), b")", b"}")), "")


@attack("… an own function of the library, which any list admitted", PICKLE)
def unnamed_own_function(attacker: Attacker) -> object:
    return attacker.pickled(
        whole(
            items(
                named("mpidist.rpc.worker_gather", "_broadcast_to_followers"),
                items(text("0"), b"}"),
                b"}",
            )
        ),
        "",
    )


@attack("The pickle is a part beside the message", PICKLE)
def far(attacker: Attacker) -> object:
    data = as_arguments(called(named(CANARY, "fire"), plain("far")))
    return attacker.pickled(b"", flags=FAR, parts=[data])


@attack("The pickle is a payload past an eager message", PICKLE)
def far_payload(attacker: Attacker) -> object:
    data = as_arguments(items(called(named(CANARY, "fire"), plain("far")), plain(b"x" * 100_000)))
    return attacker.pickled(b"", flags=FAR, parts=[data])


@attack("A pickle is the argument of a call whose result stays", PICKLE)
def remote(attacker: Attacker) -> object:
    data = as_arguments(called(named(CANARY, "fire"), plain("remote")))
    prefix = struct.pack("<QQ", 1 << 40 | 1 << 20, 1 << 40 | 1 << 20 | 1)
    return attacker.call(f"{VICTIM}:echo", data, flags=1, kind=Kind.REMOTE_PYTHON, prefix=prefix)


@attack("A pickle is the argument of an operator", PICKLE)
def operator(attacker: Attacker) -> object:
    data = as_arguments(called(named(CANARY, "fire"), plain("operator")))
    return attacker.call("torch.add", data, flags=1, kind=Kind.CALL_BUILTIN)


@attack("A pickle asks for a backward pass", PICKLE)
def backward(attacker: Attacker) -> object:
    return attacker.request(
        Kind.BACKWARD_AUTOGRAD, whole(called(named(CANARY, "fire"), plain("backward"))), flags=1
    )


@attack("A pickle is a notice of distributed autograd", PICKLE)
def notice(attacker: Attacker) -> None:
    attacker.send(
        Kind.AUTOGRAD_NOTICE, whole(called(named(CANARY, "fire"), plain("notice"))), flags=1
    )


@attack("A pickle is a gradient", PICKLE)
def gradient(attacker: Attacker) -> None:
    data = whole(called(named(CANARY, "fire"), plain("gradient")))
    attacker.send(Kind.GRADIENTS, struct.pack("<QQQB", 1, 1, 1, 0) + data, flags=1)


@attack(
    "The whole way to the worker's own list: `type` by a reference made of an exception, a str "
    "whose startswith lies, a class "
    "under the name of a listed one, and the list of the agent that a real reference leads to",
    PICKLE,
)
def own_list(attacker: Attacker) -> object:
    box = _remote_box(attacker)
    with_attributes = named("mpidist.comm.serialization.tensor_pickle", "_with_attributes")
    fake = _filled(called(named("builtins", "ValueError")), local_value=with_attributes)

    def value_of(obj: bytes) -> bytes:
        return dropped(with_slots(with_attributes, __defaults__=items(obj, b"}")))

    type_of = named("mpidist.rpc.serving.methods", "type_of")

    def kind_of(place: int, obj: bytes) -> bytes:
        return value_of(obj) + dropped(kept(place, called(type_of, again(0))))

    own = called(named("mpidist.rpc.values.pickles", "_reference"), plain(0))
    # 0: the false reference; 1: type; 2: a class whose instances are false; 3: the lying str; 4, 5:
    # classes of what is read.
    made = (
        dropped(kept(0, fake))
        + value_of(again(0))
        + dropped(with_slots(type_of, __defaults__=items(again(0))))
    )
    made += dropped(
        kept(
            1,
            called(type_of, _filled(called(named("builtins", "ValueError")), local_value=type_of)),
        )
    )
    falsy = called(
        again(1),
        plain("F"),
        items(named("builtins", "ValueError")),
        mapping(__bool__=named("builtins", "bool")),
    )
    made += dropped(kept(2, falsy))
    lying = called(
        again(1), plain("L"), items(named("builtins", "str")), mapping(startswith=again(2))
    )
    made += dropped(kept(3, lying))
    made += dropped(kept(6, own)) + _under_listed_name(kind_of, 4, again(6))
    made += dropped(kept(7, _read(value_of, again(6), "_agent"))) + _under_listed_name(
        kind_of, 5, again(7)
    )
    made += dropped(kept(8, _read(value_of, again(7), "allowed")))
    names = called(named("builtins", "frozenset"), plain(["tests.rpc.attacks", CANARY, VICTIM]))
    made += dropped(with_slots(again(8), names=names))
    table = pack_references([box.fork(attacker.to)])
    header = (
        table
        + struct.pack("<H", len(f"{VICTIM}:echo"))
        + f"{VICTIM}:echo".encode()
        + whole(made, items(b")", b"}"))
    )
    attacker.request(Kind.CALL_PYTHON, header, flags=1 | REFERENCES)
    return attacker.call(f"{CANARY}:fire")


def _remote_box(attacker: Attacker) -> rpc.RRef:
    made = rpc.remote(attacker.to, victim.Box, args=(1,))
    made._get_future().wait()
    return made


def _filled(obj: bytes, **attributes: bytes) -> bytes:
    return obj + mapping(**attributes) + b"b"


def _under_listed_name(kind_of: Callable[[int, bytes], bytes], place: int, obj: bytes) -> bytes:
    return kind_of(place, obj) + dropped(
        with_slots(again(place), __module__=plain(VICTIM), __qualname__=plain("Box"))
    )


def _read(value_of: Callable[[bytes], bytes], obj: bytes, name: str) -> bytes:
    call_method = named("mpidist.rpc.serving.methods", "call_method")
    return value_of(obj) + called(
        call_method, again(0), called(again(3), plain("__getattribute__")), items(plain(name)), b"}"
    )
