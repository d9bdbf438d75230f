"""Public names: those of the package are those of the committed list."""

from types import SimpleNamespace

import mpidist
from tests import public_names

REMEDY = "python -m tests.public_names > tests/public_names.txt, and a line in CHANGELOG.md"


def test_public_names_and_parameters_are_those_of_the_list():
    """A name or parameter that goes breaks programs; a new one is kept from then on."""
    listed = set(public_names.FILE.read_text(encoding="utf-8").splitlines())
    found = set(public_names.lines())
    gone, new = sorted(listed - found), sorted(found - listed)
    assert (gone, new) == ([], []), REMEDY


def test_each_public_package_is_in_the_list():
    listed = {name.split(".")[1] for name in (*public_names.MODULES, *public_names.READ)}
    # Its one public call is the command.
    assert listed == {*mpidist._PACKAGES} - {"tune"}


def test_parameters_are_named_with_their_kinds():
    def call(a, /, b=1, *, c, **rest):
        pass

    assert public_names._parameters(call) == "(a, b, *, c, **rest)"
    assert public_names._parameters(lambda self, *args, key: 0, bound=True) == "(*args, key)"
    module = SimpleNamespace(__name__="m", call=call, _hidden=call)
    call.__module__ = "m"
    assert public_names._defined(module) == ["call"]
