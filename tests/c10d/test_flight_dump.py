"""torch's functions that return flight records: the backend's name selects whose."""

import pickle

import pytest
import torch._C._distributed_c10d as c10d

from mpidist.c10d import flight_dump


def test_the_name_selects_the_recorder(monkeypatch):
    calls = []

    def original(*args, **kwargs):
        calls.append((args, kwargs))
        return b"torch's"

    dump = flight_dump._for_backend(lambda *args, **kwargs: ("ours", args, kwargs), original)
    assert dump(backend="mpidist", onlyActive=True) == ("ours", (), {"onlyActive": True})
    assert dump(True, False, True, "mpidist") == ("ours", (True, False, True), {})
    assert dump(True) == dump(backend="gloo") == dump(False, "nccl") == b"torch's"
    assert calls == [((True,), {}), ((), {"backend": "gloo"}), ((False,), {"backend": "nccl"})]


def test_a_torch_without_the_function_says_so():
    dump = flight_dump._for_backend(lambda rank: rank, None)
    assert dump(3, backend="mpidist") == 3
    with pytest.raises(RuntimeError, match='no such file for backend "gloo"'):
        dump(3, backend="gloo")


def test_torchs_functions_answer_without_a_group():
    for onlyActive in (False, True):
        record = pickle.loads(c10d._dump_fr_trace(onlyActive=onlyActive, backend="mpidist"))
        assert record["version"].count(".") == 1 and isinstance(record["entries"], list)
    assert pickle.loads(c10d._dump_fr_trace())["version"]


def test_torchs_functions_are_replaced_once():
    before = c10d._dump_fr_trace
    flight_dump.install()
    assert c10d._dump_fr_trace is before
