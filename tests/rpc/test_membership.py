"""Start of RPC: arguments that MPI or other workers contradict, many starts, a lone worker."""

from __future__ import annotations

import time

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.comm.mpi import agreement_lock, runtime
from mpidist.errors import MpidistError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


def echo(value):
    return value


def test_invalid_arguments_of_init_rpc_are_refused(group):
    with pytest.raises(MpidistError, match="MPI has started this process as rank"):
        rpc.init_rpc("x", rank=group.size, group=group)
    with pytest.raises(MpidistError, match="the group has"):
        rpc.init_rpc("x", world_size=group.size + 1, group=group)
    for name, words in (("", "non-empty"), ("a b", "must match"), ("x" * 200, "shorter")):
        with pytest.raises(MpidistError, match=words):
            rpc.init_rpc(name, group=group)
    for number in ({"rank": str(group.rank)}, {"world_size": str(group.size)}):
        with pytest.raises(TypeError, match="as an int, or without it"):
            rpc.init_rpc("x", **number)
    with pytest.raises(TypeError, match="backend"):
        rpc.init_rpc("x", backend="gloo", group=group)
    with pytest.raises(TypeError, match="rpc_backend_options"):
        rpc.init_rpc("x", rpc_backend_options={}, group=group)
    if group.size > 1:
        with pytest.raises(MpidistError, match="not unique"):
            rpc.init_rpc("same", group=group)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


_WRONG = {
    "rank": ({"rank": 99}, MpidistError, "was given rank 99"),
    "type": ({"rank": "0"}, TypeError, "as an int"),
    "size type": ({"world_size": "2"}, TypeError, "as an int"),
    "size": ({"world_size": 99}, MpidistError, "world_size 99"),
    "backend": ({"backend": "gloo"}, TypeError, "member of BackendType"),
    "options": ({"rpc_backend_options": {}}, TypeError, "rpc_backend_options"),
    "name": ({"name": ""}, MpidistError, "non-empty"),
    "allowed": ({"allowed": [5]}, TypeError, "allowed names functions"),
    "exits": ({"allowed": ["leaves"]}, SystemExit, "3"),
    "interrupted": ({"allowed": ["breaks"]}, KeyboardInterrupt, ""),
    "without text": ({"allowed": ["mute"]}, Unspeakable, "Unspeakable"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", _WRONG)
def test_what_one_worker_does_wrong_is_an_error_of_all(group, tmp_path, monkeypatch, case):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "breaks.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "mute.py").write_text(f"import {__name__} as m; raise m.Unspeakable")
    wrong, kind, words = _WRONG[case]
    arguments = {"name": f"w{group.rank}", "group": group}
    if group.rank == 1:
        with pytest.raises(kind) as caught:
            rpc.init_rpc(**(arguments | wrong))
        ok = kind is Unspeakable or words in str(caught.value)
    else:
        with pytest.raises(MpidistError) as caught:
            rpc.init_rpc(**arguments)
        text = str(caught.value)
        ok = "init_rpc has failed on rank 1" in text and kind.__name__ in text and words in text
    agree(group, ok, str(caught.value) if kind is not Unspeakable else "")
    rpc.init_rpc(f"w{group.rank}", group=group)
    assert rpc.rpc_sync((group.rank + 1) % group.size, echo, args=(4,)) == 4
    rpc.shutdown()


def test_begins_and_ends_many_times(group):
    for turn in range(40):
        rpc.init_rpc(f"w{group.rank}", group=group)
        assert rpc.rpc_sync((group.rank + 1) % group.size, echo, args=(turn,)) == turn
        rpc.shutdown()


def test_a_world_of_one_worker_calls_itself(group):
    if group.rank == group.size - 1:
        rpc.init_rpc("me", rank=0, world_size=1)
        assert rpc.rpc_sync("me", echo, args=(torch.ones(3),)).sum() == 3
        assert rpc.remote("me", echo, args=(4,)).to_here() == 4
        rpc.shutdown()


def test_in_a_settled_world_rpc_waits_for_the_lock_of_agreements(group):
    rpc.init_rpc(f"w{group.rank}", group=group)
    assert rpc.rpc_sync("w0", echo, args=(3,)) == 3
    group.barrier()
    future = None
    if group.rank == 0:
        runtime.settle_world(None)
        agreement_lock.lock.acquire()
    try:
        group.barrier()
        if group.rank > 0:
            future = rpc.rpc_async("w0", echo, args=(group.rank,))
            time.sleep(0.05)
        is_waiting = future is None or not future.done()
        group.barrier()
    finally:
        if group.rank == 0:
            agreement_lock.lock.release()
    # A request of its own does not pass MPI.
    found = rpc.rpc_sync("w0", echo, args=(group.rank,)) if future is None else future.wait()
    agree(group, is_waiting and found == group.rank, f"{is_waiting} {found}")
    rpc.shutdown()
