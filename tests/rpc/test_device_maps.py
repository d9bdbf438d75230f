"""Device maps that name the host, and values behind streams, on a device that delays its work."""

from __future__ import annotations

import threading

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.comm.messages import device_p2p
from mpidist.comm.serialization import tensor_table
from mpidist.comm.serialization.tensor_format import HOST
from mpidist.comm.transport import loopback
from mpidist.errors import MpidistError
from mpidist.rpc import current
from mpidist.rpc.rref_store import Entry
from tests.comm.lazy_device import LazyDevice, LazyStream
from tests.rpc.limits import shut_down
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi(min_size=1)
_device: LazyDevice


class CountingDevice(LazyDevice):
    """A device that counts the messages it has memory for."""

    def __init__(self):
        super().__init__(None)
        self.received = 0

    def empty(self, numel, dtype):
        self.received += 1
        return super().empty(numel, dtype)


def values(*args, **kwargs):
    """Return tensors' values once the work before them has run, and the number on the device."""
    _device.current().record().synchronize()
    return [one.tolist() for one in (*args, *kwargs.values())], _device.received


def same(x):
    return x


class Turns:
    """State on the device, and two handlers that overlap and change it one after the other."""

    def __init__(self):
        self.state = torch.ones(3)
        self.has_begun, self.is_changed = threading.Event(), threading.Event()


_turns: Turns


def change_first():
    """Change the state once the other handler has begun."""
    assert _turns.has_begun.wait(30)
    _device.current().do(lambda: _turns.state.mul_(5))
    _turns.is_changed.set()


def change_second():
    """Change the state after the other handler has queued its change."""
    _turns.has_begun.set()
    assert _turns.is_changed.wait(30)
    _device.current().do(lambda: _turns.state.add_(7))


def state_now():
    _device.current().record().synchronize()
    return _turns.state.tolist()


@pytest.fixture
def lazy(monkeypatch):
    global _device
    _device = CountingDevice()
    for module in (device_p2p, loopback):
        monkeypatch.setattr(module, "device_at", lambda where: where and _device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return _device


@pytest.fixture
def mapped(group, lazy):
    options = rpc.RpcBackendOptions(
        device_maps={
            f"worker{rank}": {"cpu": 0} for rank in range(group.size) if rank != group.rank
        }
    )
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    yield f"worker{(group.rank + 1) % group.size}"
    shut_down(group)


@pytest.mark.mpi(min_size=2)
def test_host_tensors_go_to_the_device_that_a_map_names(group, mapped):
    small, large = torch.arange(3), torch.arange(100_000.0)
    for args, kwargs in (
        ((small,), {}),
        ((large,), {}),
        ((small, large[5:2000], torch.ones(2, 3).t()), {"last": torch.tensor(4.5)}),
        ((torch.ones(0),), {}),
    ):
        before = group.size and rpc.rpc_sync(mapped, values)[1]
        tensors = [*args, *kwargs.values()]
        found, received = rpc.rpc_sync(mapped, values, args=args, kwargs=kwargs)
        agree(group, found == [one.tolist() for one in tensors], "values on the device")
        agree(group, received - before == len(tensors), "tensors stayed on the host")
    # The answer's map is the inverse: a host tensor of the callee stays on the host.
    answered, received = _device.received, rpc.rpc_sync(mapped, same, args=(7,))
    agree(group, received == 7 and _device.received == answered, "an answer went to a device")
    group.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("device_map", "text"),
    [
        ({1: "cpu"}, "worker1 for worker0 names cuda:1 of worker1, which sees 1 CUDA devices"),
        ({0: 2}, "worker1 for worker0 names cuda:2 of worker0, which sees 1 CUDA devices"),
    ],
)
def test_a_map_with_a_device_that_is_missing_is_refused_by_all(group, lazy, device_map, text):
    maps = {"worker0": device_map} if group.rank == 1 else {}
    options = rpc.RpcBackendOptions(device_maps=maps)
    raises_on_all(
        group,
        MpidistError,
        lambda: rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options),
        text,
    )
    agree(group, current.agent is None, "a worker has begun")


@pytest.mark.mpi(min_size=2)
def test_the_host_mapped_to_itself_is_as_without_a_map(group, lazy):
    options = rpc.RpcBackendOptions(
        device_maps={f"worker{rank}": {"cpu": "cpu"} for rank in range(group.size)}
    )
    rpc.init_rpc(f"worker{group.rank}", group=group, rpc_backend_options=options)
    x = torch.arange(5)
    agree(group, torch.equal(rpc.rpc_sync("worker0", same, args=(x,)), x), "the value")
    agree(group, lazy.received == 0, "a host tensor on a device")
    shut_down(group)


def test_a_table_names_the_devices_of_host_tensors():
    x = torch.arange(3)
    assert tensor_table.describe([x])[1:] == ([], [])
    for device_map, devices in (({HOST: 1, 0: 2}, [1]), ({HOST: HOST}, [None])):
        _, parts, found = tensor_table.describe([x], device_map)
        assert len(parts) == 1 and found == devices
    assert tensor_table.describe([x], {0: 2})[1:] == ([], [])


def test_a_value_is_read_behind_the_stream_that_computes_it(group, lazy, monkeypatch):
    """As torch orders them: the owner's other threads, and fetches."""
    rpc.init_rpc(f"worker{group.rank}", group=group)
    monkeypatch.setattr(current.require().references, "_devices", (lazy,))
    value = torch.zeros(4)
    lazy._of_thread.stream = side = LazyStream(lazy)
    side.do(lambda: value.fill_(1))
    reference = rpc.RRef(value)
    del lazy._of_thread.stream

    def read():
        lazy._of_thread.stream = LazyStream(lazy)
        local = reference.local_value()
        lazy.current().do(lambda: seen.append(local.tolist()))
        lazy.current().record().synchronize()

    seen: list[list[float]] = []
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    agree(group, seen == [[1.0] * 4], f"local_value: {seen}")
    value.zero_()
    side.do(lambda: value.fill_(2))
    again = rpc.RRef(value)  # behind nothing: the current stream is another one
    everyone = group.all_gather_object(None)
    assert len(everyone) == group.size
    lazy._of_thread.stream = side
    behind = rpc.RRef(value)
    del lazy._of_thread.stream
    length = len(lazy._default.queue)
    again.local_value()
    assert len(lazy._default.queue) == length + 1
    # A handler's thread encodes the value on its current stream, here the default stream.
    rpc.rpc_sync(f"worker{(group.rank + 1) % group.size}", fetch, args=(behind,))
    lazy._default.run_to(len(lazy._default.queue))
    agree(group, value.tolist() == [2.0] * 4, "a fetch did not wait for the stream")
    shut_down(group)


def fetch(reference):
    return reference.to_here().shape


def test_the_value_of_remote_is_behind_the_handlers_stream(group, lazy, monkeypatch):
    rpc.init_rpc(f"worker{group.rank}", group=group)
    monkeypatch.setattr(current.require().references, "_devices", (lazy,))
    group.barrier()
    reference = rpc.remote(f"worker{(group.rank + 1) % group.size}", same, args=(3,))
    agree(group, reference.to_here() == 3, "the value")
    # Alone, this worker's own reference is no fork.
    kept = [entry.events for entry in current.require().references.store._entries.values()]
    agree(group, kept != [] and all(len(events) == 1 for events in kept), str(kept))
    group.barrier()
    del reference
    shut_down(group)


def test_without_devices_nothing_is_recorded():
    entry = Entry(1)
    entry.set(5)
    assert entry.value_here() == 5 and entry.events == ()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("has_own_streams", [False, True])
def test_handlers_change_state_in_the_order_in_which_they_queue_it(
    group, lazy, monkeypatch, has_own_streams
):
    """On the default stream. On a stream for each thread an order of the host's orders nothing."""
    global _turns
    _turns = Turns()
    if has_own_streams:
        of_thread = threading.local()

        def current():
            if not hasattr(of_thread, "stream"):
                of_thread.stream = LazyStream(lazy)
            return of_thread.stream

        monkeypatch.setattr(lazy, "current", current)
    rpc.init_rpc(f"worker{group.rank}", group=group)
    group.barrier()
    found = None
    if group.rank == 1:
        for answer in [rpc.rpc_async("worker0", call) for call in (change_first, change_second)]:
            answer.wait()
        found = rpc.rpc_sync("worker0", state_now)
    shut_down(group)
    agree(group, group.rank != 1 or (found == [12.0] * 3) is not has_own_streams, str(found))
