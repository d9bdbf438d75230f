"""Data-only workers next to workers without a list: all functions of RPC, within the list."""

from __future__ import annotations

import functools
import pickle
import threading

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import CommTimeout, MpidistError, NotPlainData, RemoteError
from mpidist.rpc import api
from mpidist.rpc.rref import RRef
from tests.rpc.limits import shut_down

pytestmark = pytest.mark.mpi


class Server:
    """Not data: it stays where it is."""

    def __init__(self, size):
        self.weights = torch.zeros(size)

    def add(self, values, *, factor=1):
        self.weights += factor * values
        return self.weights

    @rpc.functions.async_execution
    def later(self, value):
        future = torch.futures.Future()
        threading.Timer(0.01, future.set_result, [value + 1]).start()
        return future

    @staticmethod
    def double(value):
        return 2 * value

    def broken(self):
        raise KeyError("broken")

    def __call__(self, value):
        return value

    def _hidden(self):
        return 1


def echo(value=None, **options):
    return options or value


def of_settings(settings):
    return settings["rate"] * settings["weights"].sum()


def unsendable():
    return Server(1)


def fail(text):
    raise ValueError(text, 3)


_gate = threading.Event()


def waits_for_gate():
    _gate.wait(10)


def open_gate():
    _gate.set()


def local(rref):
    return rref.local_value().weights.clone()


def call_back(to, value):
    return rpc.rpc_sync(to, echo, args=(value,))


@rpc.functions.async_execution
def later(value):
    future = torch.futures.Future()
    threading.Timer(0.01, future.set_result, [value]).start()
    return future


LIST = [
    echo,
    of_settings,
    fail,
    waits_for_gate,
    open_gate,
    local,
    call_back,
    later,
    unsendable,
    Server,
    torch.add,
    "aten::mul",
]


@pytest.fixture(params=["all", "some"])
def to(request, group):
    """Return the next worker's name; all have a list, or those of odd rank, the others none."""
    has_list = request.param == "all" or group.rank % 2
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=LIST if has_list else None)
    yield f"worker{(group.rank + 1) % group.size}"
    if api._is_current_rpc_agent_set():
        shut_down(group)


def is_restricted(to):
    agent = api._get_current_rpc_agent()
    return agent.workers.rank_of(to) in agent.workers.data_only


def test_calls_of_all_kinds(to):
    assert rpc.rpc_sync(to, echo, args=(1,)) == 1
    data = {"a": [1, (2.5, None, {3})], (1, "x"): b"y", "big": 1 << 100, "z": 1j}
    assert rpc.rpc_sync(to, echo, args=(data,)) == data
    assert rpc.rpc_sync(to, echo, kwargs={"x": 1, "y": [2]}) == {"x": 1, "y": [2]}
    for size in (3, 10_000, 3_000_000):
        assert torch.equal(
            rpc.rpc_async(to, echo, args=(torch.arange(float(size)),)).wait(),
            torch.arange(float(size)),
        )
    assert rpc.rpc_sync(to, of_settings, args=({"rate": 0.5, "weights": torch.ones(4)},)) == 2
    assert rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.rpc_sync(to, torch.ops.aten.mul, args=(torch.ones(2), 3)).tolist() == [3, 3]
    assert rpc.rpc_sync(to, Server.double, args=(4,)) == 8
    assert rpc.rpc_sync(to, later, args=("x",)) == "x"
    me = rpc.get_worker_info()
    assert rpc.rpc_sync(to, echo, args=(me,)) == me
    assert rpc.rpc_sync(to, call_back, args=(me.name, torch.ones(2))).tolist() == [1, 1]


def test_references(to):
    server = rpc.remote(to, Server, args=(3,))
    assert server.rpc_sync().add(torch.ones(3)).tolist() == [1, 1, 1]
    assert server.rpc_async().add(torch.ones(3), factor=2).wait().tolist() == [3, 3, 3]
    assert server.remote().add(torch.ones(3)).to_here().tolist() == [4, 4, 4]
    assert server.rpc_sync().later(1) == 2 and server.rpc_sync()(5) == 5
    assert rpc.rpc_sync(to, local, args=(server,)).tolist() == [4, 4, 4]
    own = RRef(Server(2))
    assert rpc.rpc_sync(to, echo, args=([own, {"x": server}],))[1]["x"].owner_name() == to
    assert rpc.remote(to, torch.add, args=(torch.ones(1), 1)).to_here().tolist() == [2]
    with pytest.raises(KeyError, match="broken") as caught:
        server.rpc_sync().broken()
    assert "in broken" in str(caught.value.__cause__)
    with pytest.raises((MpidistError, AttributeError), match=r"no attribute|missing"):
        server.remote().missing()
    if is_restricted(to):
        with pytest.raises(MpidistError, match="public"):
            server.rpc_sync()._hidden()
        with pytest.raises(MpidistError, match="may not be called"):
            server.rpc_sync().__getattr__("__reduce__")()


def test_what_is_no_data_fails_at_the_caller_and_nothing_is_sent(to):
    if not is_restricted(to):
        assert rpc.rpc_sync(to, functools.partial(echo, 3)) == 3
        return
    agent = api._get_current_rpc_agent()
    before = agent.calls.started
    for wrong in (lambda: 1, Server(1), torch.nn.Linear(1, 1), {"x": [open_gate.__code__]}):
        with pytest.raises(NotPlainData, match=r"argument 'value'.*reads data only"):
            rpc.rpc_sync(to, echo, args=(wrong,))
        with pytest.raises(NotPlainData, match="argument 'value'"):
            rpc.remote(to, echo, args=(wrong,))
    with pytest.raises(NotPlainData, match="no importable name"):
        rpc.rpc_sync(to, functools.partial(echo, 1))
    with pytest.raises(MpidistError, match="not in the list"):
        rpc.rpc_sync(to, echo, args=(pickle.loads,))
    assert agent.calls.started <= before + 1


def test_errors_and_results_that_cannot_be_sent(group, to):
    _gate.clear()
    group.barrier()
    with pytest.raises(ValueError, match="why") as caught:
        rpc.rpc_sync(to, fail, args=("why",))
    assert caught.value.args == ("why", 3) and "in fail" in str(caught.value.__cause__)
    me = rpc.get_worker_info().name
    if is_restricted(me):
        with pytest.raises(
            NotPlainData, match=r"Server is no plain data, and worker[0-9] reads data only"
        ):
            rpc.rpc_sync(to, unsendable)
        assert rpc.remote(to, unsendable).rpc_sync().add(torch.ones(1)).tolist() == [1]
        if to != me:  # of a worker's own value nothing is sent
            with pytest.raises(NotPlainData):
                rpc.remote(to, unsendable).to_here()
    with pytest.raises(CommTimeout, match="waits_for_gate"):
        rpc.rpc_sync(to, waits_for_gate, timeout=0.05)
    rpc.rpc_sync(to, open_gate)
    if is_restricted(to):
        with pytest.raises(MpidistError, match="not in the list"):
            rpc.rpc_sync(to, pickle.loads, args=(b"",))


def test_gathering(to, group):
    found = api._all_gather({"rank": group.rank, "t": torch.ones(1)})
    assert [found[f"worker{rank}"]["rank"] for rank in range(group.size)] == list(range(group.size))


def test_an_invalid_list_of_one_worker_fails_init_rpc_on_all(group):
    names = ["no.such.function"] if group.rank == group.size - 1 else [echo]
    right = ValueError if group.rank == group.size - 1 else MpidistError
    with pytest.raises(right, match=r"no\.such"):
        rpc.init_rpc(f"worker{group.rank}", group=group, allowed=names)
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=[])
    with pytest.raises((MpidistError, RemoteError), match="not in the list"):
        rpc.rpc_sync((group.rank + 1) % group.size, echo)
    shut_down(group)


def test_trust_in_data_alone_needs_a_list(group, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRUST", "data")
    with pytest.raises(MpidistError, match="needs a list"):
        rpc.init_rpc(f"worker{group.rank}", group=group)
