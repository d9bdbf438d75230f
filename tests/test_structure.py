"""Counts of the package's structure."""

from __future__ import annotations

import ast
import re

import pytest

from tests import structure
from tests.test_imports import ROOT, read_modules, write_tree

# Functions and methods that read or write text, and those that do in a mode without "b".
_OF_TEXT, _BY_MODE = ("read_text", "write_text"), ("open", "fdopen")
# Of ``x.open()`` these are files.
_FILES = ("path", "file", "gzip", "os", "io")

TREE = {
    "mpidist/__init__.py": "",
    "mpidist/rpc/__init__.py": "",
    "mpidist/rpc/wire.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from mpidist.rpc.api import stop
class Wire:
    def send(self): ...
    def _flush(self): ...
""",
    "mpidist/rpc/calls/__init__.py": "",
    "mpidist/rpc/calls/pending.py": """
class Pending:
    def __init__(self): self._held = {}
    def add(self): ...
    def same(self, other): return self._held is other._held
""",
    "mpidist/rpc/calls/start.py": """
from mpidist.rpc.calls.pending import Pending
from mpidist.rpc.wire import Wire
class Calls(Pending):
    def __init__(self):
        self._wire = Wire()
    def start(self): self._wire._flush()
""",
    "mpidist/rpc/api.py": """
from mpidist.rpc.calls.start import Calls
calls = Calls()
def stop(tensor): return calls._wire, tensor.grad._unknown
""",
}


@pytest.fixture
def tree(tmp_path):
    modules = read_modules(write_tree(tmp_path, TREE))
    return modules, structure.classes_of(modules)


def test_a_folder_is_one_room_of_the_floors(tree):
    graph = structure.rooms(tree[0], "rpc")
    assert graph == {"wire": set(), "calls": {"wire"}, "api": {"calls"}}
    assert structure.floors(graph) == 3


def test_methods_are_those_of_all_bases_and_parts_stand_beside_them(tree):
    _, classes = tree
    name = "mpidist.rpc.calls.start.Calls"
    assert structure.methods_of(classes, name) == {"__init__", "add", "same", "start"}
    assert structure.parts_of(classes, name) == {"mpidist.rpc.wire.Wire"}


def test_a_base_with_one_subclass_elsewhere_is_a_half(tree):
    modules, classes = tree
    assert structure.halves(classes, modules) == ["mpidist.rpc.calls.pending.Pending"]


def test_private_names_of_other_objects_are_reach_ins(tree):
    modules, classes = tree
    found = [(entry.module, entry.text) for entry in structure.reach_ins(classes, modules)]
    assert sorted(found) == [
        ("mpidist.rpc.api", "calls._wire"),
        ("mpidist.rpc.calls.start", "self._wire._flush"),
    ]


def test_the_command_prints_the_counts_of_a_tree(tree, tmp_path, capsys):
    structure.main(["--root", str(tmp_path)])
    text = capsys.readouterr().out
    assert "reach-ins to private names" in text
    assert re.search(r"^  rpc +3 \(3\), 6 modules", text, re.MULTILINE), text


def _has_locales_encoding(call):
    """Return whether a call opens text, or a pipe of text, in the encoding of the locale."""
    words = {word.arg: word.value for word in call.keywords}
    if "encoding" in words or None in words:
        return False
    if any(name in words for name in ("text", "universal_newlines")):
        return True
    match call.func:
        case ast.Attribute(attr=name) if name in _OF_TEXT:
            return True
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            is_file = name in _BY_MODE and owner in _FILES and (owner, name) != ("os", "open")
            place = 1 if owner in ("gzip", "os", "io") else 0
        case ast.Name(id="open" as name):
            is_file, place = True, 1
        case _:
            return False
    mode = words.get("mode", call.args[place] if len(call.args) > place else ast.Constant("r"))
    return is_file and not (isinstance(mode, ast.Constant) and "b" in mode.value)


def test_text_is_read_and_written_in_one_encoding():
    """A file that one job writes is read by another, whatever the locale of either."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "mpidist").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _has_locales_encoding(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("open(path)", True), ("open(path, 'w')", True), ("open(path, 'rb')", False),
        ("self.path.open()", True), ("path.open('rb')", False), ("self.slots.open()", False),
        ("path.read_text()", True), ("path.read_text(encoding='utf-8')", False),
        ("gzip.open(path, 'rt')", True), ("os.open(path, flags)", False),
        ("subprocess.run(words, text=True)", True), ("open(path, **words)", False),
    ],
)  # fmt: skip
def test_text_in_the_encoding_of_the_locale_is_found(text, is_found):
    assert _has_locales_encoding(ast.parse(text).body[0].value) is is_found
