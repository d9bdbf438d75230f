"""Copies of exceptions: equal in all but the traceback."""

import pytest
import torch

from mpidist.errors import CommTimeout, RankFailureError
from mpidist.exception_copy import copy_exception


class Formatted(Exception):
    """Makes its message of another argument."""

    def __init__(self, number):
        super().__init__(f"number {number}")
        self.number = number


class Slotted(ValueError):
    """Keeps a value in a slot, and one in the slot of its base."""

    __slots__ = ("place",)


class OfFile(OSError):
    """A subclass of an exception with state in C."""


def slotted():
    error = Slotted("at")
    error.place = 3
    error.more = [4]
    error.add_note("a note")
    return error


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (Formatted(7), ("number",)),
        (slotted(), ("place", "more", "__notes__")),
        (OfFile(2, "no such file", "name"), ("errno", "filename", "strerror")),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), ("object", "reason")),
        (ImportError("of it", name="module", path="file"), ("name", "path")),
        (KeyError("key"), ()),
        (CommTimeout("late"), ()),
        (RankFailureError("gone", [3, 1]), ("ranks",)),
        (SystemExit(3), ("code",)),
        (torch.OutOfMemoryError("much"), ()),
    ],
)
def test_an_exception_is_made_anew(error, names):
    error.__cause__ = RuntimeError("cause")
    made = copy_exception(error)
    assert made is not error and type(made) is type(error)
    assert str(made) == str(error) and made.args == error.args
    assert made.__cause__ is error.__cause__ and made.__suppress_context__
    assert [getattr(made, name) for name in names] == [getattr(error, name) for name in names]


def test_what_cannot_be_made_anew_is_the_exception_itself():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why")
    error.args = ()
    assert copy_exception(error) is error


def test_causes_keep_their_texts_and_no_frames():
    def raised():
        try:
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error
        except ValueError:
            raise TypeError("third")  # noqa: B904

    with pytest.raises(TypeError) as caught:
        raised()
    made = copy_exception(caught.value)
    context = made.__context__
    cause = context.__cause__
    assert [repr(one) for one in (made, context, cause)] == [
        "TypeError('third')",
        "ValueError('second')",
        "KeyError('first')",
    ]
    assert not any(one.__traceback__ for one in (made, context, cause))
    assert caught.value.__context__.__traceback__ is not None
    assert copy_exception(caught.value, 1).__context__ is None


def test_a_chain_without_end_is_cut():
    error = ValueError("again")
    error.__cause__ = error
    copy_exception(error)
