"""Attacks by malformed data: hand-written MessagePack and extension types."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from mpidist.comm.serialization.data_format import (
    COMPLEX,
    DEVICE,
    DTYPE,
    ELLIPSIS,
    FROZENSET,
    INTEGER,
    NUMBER,
    OBJECT,
    PAIRS,
    SCALAR,
    SET,
    SIZE,
    TEXT,
    TUPLE,
)
from mpidist.rpc.message import ANNOUNCED, AUTOGRAD, FAR, REFERENCES, Kind, pack_references
from mpidist.rpc.values.codec import KEYWORDS, PLAIN
from mpidist.rpc.values.data_values import ERROR, NAMED, RECORD, REFERENCE, REGISTERED, WORKER
from tests.rpc.attacks.attacker import Attacker, Attacks

attack = Attacks()

DAMAGED = "FrameError"
REFUSED = "not in the list|Refused|FrameError"
REGISTERED_REFUSED = "TypeError|ValueError|FrameError|MpidistError|Refused"
VICTIM = "tests.rpc.attacks.victim"
CANARY = "tests.rpc.attacks.canary"
ECHO = f"{VICTIM}:echo"

encode = msgspec.msgpack.encode


def ext(code: int, data: bytes, announced: int | None = None) -> bytes:
    """Write an extension type; ``announced`` in the place of its length."""
    return b"\xc9" + struct.pack(">Ib", len(data) if announced is None else announced, code) + data


def array(*items: bytes) -> bytes:
    """Write an array of what is written already."""
    return b"\xdd" + struct.pack(">I", len(items)) + b"".join(items)


def reference(number: int) -> bytes:
    """Write the mark of a reference."""
    return ext(REFERENCE, NUMBER.pack(number))


def own(code: int, *values: Any) -> bytes:
    """Write an extension type with an array of plain values; ``Written`` bytes are copied."""
    return ext(
        code,
        array(*[value.data if isinstance(value, Written) else encode(value) for value in values]),
    )


class Written:
    """What is MessagePack already."""

    def __init__(self, data: bytes) -> None:
        self.data = data


NO_ARGUMENTS, NO_ATTRIBUTES = Written(ext(TUPLE, array())), {}


def register(
    name: str, idea: str, item: bytes, reason: str = DAMAGED, is_whole: bool = False
) -> None:
    """Note an attack: a call with one argument, or with these bytes in the place of all."""

    def run(attacker: Attacker) -> object:
        body = item if is_whole else array(item)
        if len(body) > 8000:
            return attacker.call(ECHO, b"", flags=FAR, parts=[body])
        return attacker.call(ECHO, body)

    run.__name__ = name
    attack(idea, reason)(run)


# MessagePack.
register("never_used", "The one byte that MessagePack does not use", b"\xc1")
register("array_announced", "2^32 - 1 items announced, none there", b"\xdd\xff\xff\xff\xff")
register("map_announced", "2^32 - 1 pairs announced, none there", b"\xdf\xff\xff\xff\xff")
register("text_announced", "4 GiB of text announced, none there", b"\xdb\xff\xff\xff\xff")
register("bytes_announced", "4 GiB of bytes announced, none there", b"\xc6\xff\xff\xff\xff")
register(
    "extension_announced",
    "4 GiB of an extension type announced, none there",
    ext(INTEGER, b"", 0xFFFFFFFF),
)
register(
    "many_announced", "Arrays of 2^32 - 1 items within each other", b"\xdd\xff\xff\xff\xff" * 1500
)
register("deep", "100,000 arrays within each other", b"\x91" * 100_000 + b"\xc0")
register("deep_maps", "100,000 maps within each other", b"\x81\xc0" * 100_000 + b"\xc0")
register("cut_off", "An int that is cut off", b"\xcf\0\0")
register("behind", "Bytes behind the data", array(b"\xc0") + b"\xc0", is_whole=True)
register("no_utf8", "A text that is no UTF-8", b"\xa2\xff\xfe")
register("key_map", "A map as a key", b"\x81\x80\x01")
register("no_arguments", "An int in the place of the arguments", b"\x01", is_whole=True)
register("map_for_arguments", "A map in the place of the arguments", b"\x80", is_whole=True)
register("text_for_arguments", "A text in the place of the arguments", b"\xa3abc", is_whole=True)
register("empty", "One byte of nothing", b"\0", is_whole=True)
register(
    "marshalled",
    "Another format: what Python's marshal writes",
    b"\xa9\x01\xe9\x01\0\0\0",
    is_whole=True,
)
register("timestamp", "A timestamp of a wrong length", ext(-1, b"\0\0\0"))
register(
    "timestamp_far",
    "A timestamp beyond what a datetime holds",
    ext(-1, struct.pack(">Iq", 0, 1 << 62)),
)
register(
    "timestamp_nanoseconds",
    "A timestamp of 2^32 - 1 nanoseconds",
    ext(-1, struct.pack(">Iq", 0xFFFFFFFF, 0)),
)

# Its extension types.
register("unknown_code", "A code that there is not", ext(99, array()))
register("unknown_low_code", "… below the callers' own", ext(31, array()))
register("negative_code", "A code below 0", ext(-7, b"\0"))
register(
    "object_beyond", "A mark of an object beyond those that came", ext(OBJECT, struct.pack("<I", 1))
)
register("object_far_beyond", "… far beyond", ext(OBJECT, struct.pack("<I", 0xFFFFFFFF)))
register("object_short", "A mark of one byte", ext(OBJECT, b"\0"))
register("tuple_of_int", "A tuple that holds no array", ext(TUPLE, b"\x01"))
register("tuple_empty", "A tuple without bytes", ext(TUPLE, b""))
register("tuple_behind", "A tuple with bytes behind it", ext(TUPLE, b"\x90\x90"))
register("set_of_lists", "A set of lists", ext(SET, array(b"\x90")))
register("set_of_maps", "A frozenset of maps", ext(FROZENSET, array(b"\x80")))
register("set_of_sets", "A set of sets", ext(SET, array(ext(SET, array()))))
register("pairs_odd", "A key without a value", ext(PAIRS, array(b"\x01")))
register("pairs_of_lists", "A dict with a list as a key", ext(PAIRS, array(b"\x90", b"\x01")))
register("complex_short", "A complex number of 8 bytes", ext(COMPLEX, b"\0" * 8))
register("complex_long", "A complex number of 17 bytes", ext(COMPLEX, b"\0" * 17))
register("ellipsis_bytes", "An ellipsis with bytes", ext(ELLIPSIS, b"\0"))
register(
    "text_no_utf8", "A text with bytes that even surrogates do not make", ext(TEXT, b"\xff\xff")
)
register("scalar_name", "A numpy scalar of type object", own(SCALAR, "object", b"\1" * 8))
register("scalar_void", "A numpy scalar of a record type", own(SCALAR, "void64", b"\1" * 8))
register(
    "scalar_dtype_text",
    "A numpy scalar whose type is a description",
    own(SCALAR, "O,O", b"\1" * 16),
)
register("scalar_short", "A numpy scalar of too few bytes", own(SCALAR, "float64", b"\0" * 7))
register("scalar_long", "A numpy scalar of too many", own(SCALAR, "float64", b"\0" * 9))
register("scalar_bool", "A numpy bool that is 2", own(SCALAR, "bool", b"\2"))
register("scalar_no_bytes", "A numpy scalar of an int", own(SCALAR, "float64", 1))
register("scalar_list", "A numpy scalar whose type is a list", own(SCALAR, [], b"\0"))
register("scalar_fields", "A numpy scalar of three fields", own(SCALAR, "float64", b"\0" * 8, 1))
register("dtype_name", "A dtype that there is not", ext(DTYPE, b"__class__"))
register("dtype_dotted", "A path in the place of a dtype", ext(DTYPE, b"torch.load"))
register("dtype_no_utf8", "A dtype that is no text", ext(DTYPE, b"\xff"))
register("device_kind", "A device of a backend that would be loaded", own(DEVICE, "hpu", 0))
register("device_text", "A device's index that is a text", own(DEVICE, "cuda", "0"))
register("device_below", "A device's index below 0", own(DEVICE, "cuda", -1))
register("device_far", "A device's index of 2^40", own(DEVICE, "cuda", 1 << 40))
register("device_bool", "A device's index that is a bool", own(DEVICE, "cuda", True))
register("device_list", "A device whose type is a list", own(DEVICE, [], 0))
register("size_below", "A size below 0", own(SIZE, -1))
register("size_float", "A size that is a float", own(SIZE, 1.0))
register("size_huge", "A size of 2^63", own(SIZE, 1 << 63))

# RPC's.
register("reference_beyond", "A reference beyond those that came", reference(0))
register("reference_far", "A reference's number of 2^32 - 1", ext(REFERENCE, b"\xff" * 4))
register("reference_short", "A reference's number of one byte", ext(REFERENCE, b"\0"))
register("reference_text", "A reference's number that is an array", own(REFERENCE, "0"))
register("reference_none", "A reference without a number", ext(REFERENCE, b""))
register("reference_two", "A reference of two numbers", ext(REFERENCE, b"\0" * 8))
register("named_unlisted", "An unlisted function by name", own(NAMED, f"{CANARY}:fire"), REFUSED)
register("named_system", "os.system by name", own(NAMED, "posix:system"), REFUSED)
register(
    "named_dotted",
    "A path from a listed class",
    own(NAMED, f"{VICTIM}:Box.get.__globals__"),
    REFUSED,
)
register("named_module", "A module", own(NAMED, VICTIM), REFUSED)
register("named_number", "A name that is a number", own(NAMED, 1), REFUSED)
register("named_list", "A name that is a list", own(NAMED, []), REFUSED)
register("named_none", "No name", own(NAMED), REFUSED)
register(
    "record_unlisted",
    "A record of an unlisted class",
    own(RECORD, f"{VICTIM}:Unlisted", 1),
    REFUSED,
)
register(
    "record_class", "A record of a class without fields", own(RECORD, f"{VICTIM}:Box", 1), REFUSED
)
register("record_function", "A record of a function", own(RECORD, f"{VICTIM}:echo", 1), REFUSED)
register("record_builtin", "A record of a builtin class", own(RECORD, "builtins:dict", 1), REFUSED)
register("record_few", "A record of too few fields", own(RECORD, f"{VICTIM}:Point", 1))
register("record_many", "A record of too many fields", own(RECORD, f"{VICTIM}:Point", 1, 2, 3))
register("record_pair", "A named tuple of too many fields", own(RECORD, f"{VICTIM}:Pair", 1, 2, 3))
register("record_none", "A record without a name", own(RECORD))
register("record_number", "A record whose name is a number", own(RECORD, 1, 2))
register(
    "worker_name", "A worker whose name is none", own(WORKER, "a/../b", 0), f"{REFUSED}|Worker name"
)
register("worker_number", "A worker whose name is a number", own(WORKER, 1, 0))
register("worker_rank", "A worker whose rank is a text", own(WORKER, "a", "0"))
register("worker_fields", "A worker of one field", own(WORKER, "a"))
register(
    "registered_unknown",
    "An object of a registered class of an unknown kind",
    own(REGISTERED, 99, 1),
    REFUSED,
)
register("registered_list", "… whose kind is a list", own(REGISTERED, []), REFUSED)
register("registered_none", "… without a kind", own(REGISTERED), REFUSED)
register(
    "registered_empty",
    "An object of a registered class without contents",
    own(REGISTERED, 0),
    REGISTERED_REFUSED,
)
register(
    "registered_text",
    "A remote module whose reference is a text",
    own(REGISTERED, 1, 0, "cpu", "x", None),
    REGISTERED_REFUSED,
)
register(
    "registered_rank",
    "A remote module on a worker that there is not",
    own(REGISTERED, 1, 99, "cpu", None, None),
    REGISTERED_REFUSED,
)
register(
    "registered_device",
    "A remote module on a device that is a number",
    own(REGISTERED, 1, 0, 5, None, None),
    REGISTERED_REFUSED,
)
register(
    "registered_class",
    "A remote module whose interface is a text",
    own(REGISTERED, 1, 0, "cpu", None, "eval"),
    REGISTERED_REFUSED,
)
register(
    "registered_many",
    "A remote module of nine fields",
    own(REGISTERED, 1, *range(9)),
    REGISTERED_REFUSED,
)
for _name, _class in {
    "exit": "builtins:SystemExit",
    "interrupt": "builtins:KeyboardInterrupt",
    "function": "builtins:eval",
    "class": "builtins:type",
    "canary": f"{CANARY}:Bird",
    "library": "mpidist.rpc.current:require",
    "dotted": "builtins:ValueError.__class__",
    "base": "builtins:BaseException",
    "groups": "builtins:BaseExceptionGroup",
}.items():
    register(
        f"error_{_name}",
        f"An exception by the name {_class}",
        own(ERROR, _class, "text", NO_ARGUMENTS, NO_ATTRIBUTES),
        REFUSED,
    )
register(
    "error_arguments",
    "An exception whose arguments are no tuple",
    own(ERROR, "builtins:ValueError", "text", 1, {}),
)
register(
    "error_attributes",
    "An exception whose attributes are no dict",
    own(ERROR, "builtins:ValueError", "text", NO_ARGUMENTS, 1),
)
register(
    "error_text",
    "An exception whose text is a number, of an unlisted class",
    own(ERROR, "a:b", 1, NO_ARGUMENTS, {}),
    REFUSED,
)
register("error_fields", "An exception of one field", own(ERROR, "builtins:ValueError"))
register(
    "error_unicode",
    "An exception whose constructor wants other arguments",
    own(ERROR, "builtins:UnicodeDecodeError", "text", NO_ARGUMENTS, {}),
    f"{REFUSED}|TypeError",
)


def _unicode(kind: str, obj: Any, start: int, end: int) -> bytes:
    """Write a UnicodeError. CPython 3.11 does not check the start of a UnicodeDecodeError."""
    arguments = Written(ext(TUPLE, array(*map(encode, ("utf8", obj, start, end, "reason")))))
    return own(ERROR, f"builtins:{kind}", "text", arguments, {})


register(
    "error_far",
    "A UnicodeDecodeError that reads far away",
    _unicode("UnicodeDecodeError", b"abc", -(1 << 50), 1 - (1 << 50)),
)
register(
    "error_near",
    "A UnicodeDecodeError that reads before its object",
    _unicode("UnicodeDecodeError", b"abc", -32, -31),
)
register(
    "error_behind",
    "A UnicodeDecodeError that reads behind its object",
    _unicode("UnicodeDecodeError", b"abc", 3, 4),
)
register(
    "error_of_text", "A UnicodeDecodeError of a str", _unicode("UnicodeDecodeError", "abc", 0, 1)
)
register(
    "error_encode",
    "A UnicodeEncodeError beyond its object",
    _unicode("UnicodeEncodeError", "abc", 0, 1 << 40),
)
register(
    "error_dunder",
    "An exception with __class__ among its attributes",
    own(ERROR, "mpidist.errors:RemoteError", "text", NO_ARGUMENTS, {"__class__": 1}),
    f"{DAMAGED}|",
)


def _nested(code: int, levels: int) -> bytes:
    data = b"\x90"
    for _ in range(levels):
        data = array(ext(code, data))
    return data


register("deep_extensions", "1,000 tuples within each other", _nested(TUPLE, 1000))
register("deep_sets", "1,000 frozensets within each other", _nested(FROZENSET, 1000))


# Flags and the tables before the content.


@attack("The names of keywords that are no list", DAMAGED)
def keywords_no_list(attacker: Attacker) -> object:
    return attacker.call(ECHO, encode([1, 2]), flags=KEYWORDS)


@attack("More keywords than arguments", DAMAGED)
def keywords_many(attacker: Attacker) -> object:
    return attacker.call(ECHO, encode([["a", "b"], 1]), flags=KEYWORDS)


@attack("A keyword that is a number", DAMAGED)
def keywords_number(attacker: Attacker) -> object:
    return attacker.call(ECHO, encode([[1], 1]), flags=KEYWORDS)


@attack("A keyword twice", DAMAGED)
def keywords_twice(attacker: Attacker) -> object:
    return attacker.call(ECHO, encode([["a", "a"], 1, 2]), flags=KEYWORDS)


@attack("Keywords announced, and no data", DAMAGED)
def keywords_nothing(attacker: Attacker) -> object:
    return attacker.call(ECHO, encode([]), flags=KEYWORDS)


@attack("An extension type in data that is said to be plain", DAMAGED)
def not_plain(attacker: Attacker) -> object:
    return attacker.call(ECHO, array(reference(0)), flags=PLAIN)


def _with_references(attacker: Attacker, *rows: tuple[int, int, int]) -> object:
    name = ECHO.encode()
    items = array(*[reference(number) for number in range(len(rows))])
    header = pack_references(rows) + struct.pack("<H", len(name)) + name + items
    return attacker.request(Kind.CALL_PYTHON, header, flags=REFERENCES)


@attack("A reference whose owner is no worker", DAMAGED)
def owner_beyond(attacker: Attacker) -> object:
    return _with_references(attacker, (1, 2, 77))


@attack("… of rank 2^32 - 1", DAMAGED)
def owner_far_beyond(attacker: Attacker) -> object:
    return _with_references(attacker, (1, 2, 0xFFFFFFFF))


@attack("References announced, and cut off", DAMAGED)
def references_cut_off(attacker: Attacker) -> object:
    return attacker.request(Kind.CALL_PYTHON, struct.pack("<H", 65535), flags=REFERENCES)


@attack("No room for their number", DAMAGED)
def references_nothing(attacker: Attacker) -> object:
    return attacker.request(Kind.CALL_PYTHON, b"", flags=REFERENCES)


@attack("2^32 - 1 references announced in a part", DAMAGED)
def announced_cut_off(attacker: Attacker) -> object:
    return attacker.call(ECHO, b"", flags=ANNOUNCED | FAR, parts=[b"\xff\xff\xff\xff"])


@attack("A number of distributed autograd announced, and cut off", DAMAGED)
def autograd_cut_off(attacker: Attacker) -> object:
    return attacker.request(Kind.CALL_PYTHON, b"\0\0\0", flags=AUTOGRAD)


@attack("All flags at once", "FrameError|data only")
def all_flags(attacker: Attacker) -> object:
    return attacker.call(ECHO, b"\0" * 64, flags=255)
