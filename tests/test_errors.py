"""Exceptions: their bases and the facts that they carry; pure."""

import pytest

from mpidist import errors
from mpidist.errors import NotPlainData, RankFailureError, RemoteError, WorkerErrors


def test_all_are_one_family_and_some_are_pythons_kinds():
    found = [each for each in vars(errors).values() if isinstance(each, type)]
    assert len(found) > 10 and all(
        issubclass(each, errors.MpidistError)
        for each in found
        if each.__module__ == errors.__name__
    )
    assert issubclass(errors.CommTimeout, TimeoutError) and issubclass(NotPlainData, TypeError)


def test_facts_are_kept_beside_the_text():
    dead = RankFailureError("gone", [3, 1])
    remote = RemoteError("no", 2, "KeyError")
    assert (str(dead), sorted(dead.ranks)) == ("gone", [1, 3])
    assert (str(remote), remote.rank, remote.type_name) == ("no", 2, "KeyError")
    failure = ValueError("x")
    assert WorkerErrors("two", {"a": failure}).errors == {"a": failure}
    assert WorkerErrors("none").errors == {}


def test_the_place_of_what_is_no_data_grows_from_within():
    error = NotPlainData("a function", "[1]").within("['a']")
    assert "['a'][1]" in str(error)
    with pytest.raises(NotPlainData, match="object"):
        raise NotPlainData.of(object())
