"""Native group behind a torch group; pure."""

from types import SimpleNamespace

from mpidist.c10d.native import native_of


def test_a_group_of_another_backend_has_none():
    native = object()
    assert native_of(SimpleNamespace(native=native)) is native
    assert native_of(object()) is None
