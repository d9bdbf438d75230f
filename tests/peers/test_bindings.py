"""Bindings of a suite's names."""

import sys
import types

from tests.peers import bindings


def test_bindings(monkeypatch):
    suite = types.ModuleType("a_suite")
    suite.Kind = int
    monkeypatch.setitem(sys.modules, "a_suite", suite)
    bindings.bind("a_suite:Kind=collections:OrderedDict,a_suite:Later=collections:deque")
    assert (suite.Kind.__name__, suite.Later.__name__) == ("OrderedDict", "deque")
    assert bindings.bindings("") == []
