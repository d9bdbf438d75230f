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
