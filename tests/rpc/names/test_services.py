"""Services: resolved by name only, with checked arguments."""

from __future__ import annotations

import pytest

from mpidist.errors import MpidistError
from mpidist.rpc import worker_gather
from mpidist.rpc.message import COUNT, Kind
from mpidist.rpc.names import callee, services
from mpidist.rpc.serving import methods


def test_services_are_these_and_no_others():
    assert set(services.names.values()) == {
        "type_of",
        "has_method",
        "put_part",
    }
    for function, name in services.names.items():
        kind, named = callee.wire_name(function)
        assert kind == Kind.CALL_SERVICE and named == COUNT.pack(len(name)) + name.encode()
        assert callee.resolve(kind, name.encode()) is function


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"service",
        b"names",
        b"call_method",
        b"mpidist.rpc.serving.methods:type_of",
        b"\xff",
        b"type_of\0",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(MpidistError, match=r"is no service|no UTF-8"):
        callee.resolve(int(Kind.CALL_SERVICE), name)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (methods.type_of, (3,)),
        (methods.has_method, ("text", "__class__")),
        (methods.call_method, ("get", {})),
        (worker_gather.put_part, ("1", 0, ("worker0",), None)),
        (worker_gather.put_part, (1, True, ("worker0",), None)),
        (worker_gather.put_part, (1, 0, ["worker0"], None)),
        (worker_gather.put_part, (1, 0, ("worker0", 3), None)),
    ],
)
def test_arguments_of_other_kinds_are_refused(function, arguments):
    with pytest.raises(TypeError):
        function(*(() if function is methods.call_method else (0,)), *arguments)
    assert not worker_gather._parts
