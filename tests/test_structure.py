"""Counts of the package's structure."""

from __future__ import annotations

import re

import pytest

from tests import structure
from tests.test_imports import read_modules, write_tree

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
