"""MPI calls on device memory: all that this library makes are made by the trial.

The device is a lazy fake in host memory; the addresses that belong to it are recorded.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from mpidist.comm import SUM
from mpidist.comm.algorithms import device_all_reduce, mpi_types, reduce_op
from mpidist.comm.discovery import trial_operations
from mpidist.comm.execution import execution, fast_path
from mpidist.comm.memory import buffer
from mpidist.comm.messages import device_p2p, direct_messages
from mpidist.comm.mpi.nonblocking import MpiCalls, wait_sleeping
from mpidist.comm.transport.transport import Transport
from mpidist.errors import MpidistError
from tests.comm.lazy_device import LazyDevice
from tests.tools.support import agree, finished

# Another object than the host's, so that the trial's tensors tell on which of the two they are.
DEVICE = torch.device("cpu", 0)
WITH_HOST = ("point_to_point_with_host", "Bcast", "Ibcast")


class Calls:
    """Communicator, or a message matched on it, that records the calls with memory of a device.

    Attributes:
        seen: (call, "device" or "host") for each buffer that is not empty.
    """

    def __init__(self, real, spans, seen, is_message=False):
        self._real, self._spans, self.seen, self._is_message = real, spans, seen, is_message

    def __getattr__(self, name):
        value = getattr(self._real, name)
        if not name[0].isupper() or not callable(value) or name in ("Free", "Get_rank"):
            return value

        def call(*args, **kwargs):
            for memory in filter(None, map(self._memory, args)):
                self.seen.add((f"matched {name}" if self._is_message else name, memory))
            result = value(*args, **kwargs)
            is_match = name in ("Mprobe", "Improbe") and result is not None
            return Calls(result, self._spans, self.seen, is_message=True) if is_match else result

        return call

    def _memory(self, argument):
        memory = argument[0] if isinstance(argument, (tuple, list)) and argument else None
        if memory is None or not len(memory):
            return ""
        address = trial_operations.MPI.buffer.frombuffer(memory, readonly=True).address
        is_device = any(start <= address < end for start, end in self._spans)
        return "device" if is_device else "host"


class Device(LazyDevice):
    """A lazy device that knows its memory."""

    def __init__(self):
        super().__init__(None)
        self.spans, self._tensors = [], []

    def hold(self, tensor):
        self._tensors.append(tensor)
        self.spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def empty(self, numel, dtype):
        return self.hold(self.staging(numel, dtype))

    def has(self, tensor):
        return any(start <= tensor.data_ptr() < end for start, end in self.spans)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    made = Device()

    def device_of(tensors):
        return made if any(map(made.has, tensors)) else None

    for module in (execution, device_p2p):
        monkeypatch.setattr(module, "device_of", device_of)
        monkeypatch.setattr(module, "device_at", lambda where: made if where else None)
    is_direct = buffer.is_direct
    monkeypatch.setattr(
        buffer, "is_direct", lambda *ts: not any(map(made.has, ts)) and is_direct(*ts)
    )
    monkeypatch.setattr(fast_path, "_flat", lambda *args: None)
    monkeypatch.setattr(fast_path.FastPath, "find", lambda path, tensor, op: None)
    monkeypatch.setattr(direct_messages.DirectMessages, "take", lambda direct, *args: False)
    return made


def watch(patches, group, device, seen, wrap=lambda mpi: mpi):
    """Record the calls of a group, of both its threads, of its messages, and of transports."""
    watched = wrap(Calls(group._state.mpi, device.spans, seen))
    for owner, name in [
        (group._state, "mpi"),
        (group._comm, "mpi"),
        (group._comm, "plain"),
        (group._messages.receives, "_mpi"),
    ]:
        patches.setattr(owner, name, watched)


def collectives(group, device, patches):
    """Execute every collective that has a form for device memory, in all its algorithms."""
    size = group.size
    for numel in (5, 30_000):

        def tensor(parts=1, numel=numel):
            return device.hold(torch.ones(parts * numel))

        for async_op in (False, True):
            for name in device_all_reduce.ALGORITHMS:
                patches.setattr(
                    device_all_reduce,
                    "choose",
                    lambda comm, flat, op, name=name: device_all_reduce.algorithm(
                        comm, flat.dtype, flat.nbytes, op, flat.device, name
                    ),
                )
                finished(group.all_reduce(tensor(), async_op=async_op))
            finished(group.all_reduce_coalesced([tensor(), tensor()], async_op=async_op))
            finished(group.reduce_scatter_tensor(tensor(), tensor(size), async_op=async_op))
            finished(group.broadcast(tensor(), 0, async_op=async_op))
            finished(group.all_gather_into_tensor(tensor(size), tensor(), async_op=async_op))
            whole = tensor(size)
            own = whole.chunk(size)[group.rank]
            finished(group.all_gather_into_tensor(whole, own, async_op=async_op))
            parts = [tensor() for _ in range(size)]
            finished(group.all_gather(parts, tensor(), async_op=async_op))
            finished(group.all_to_all(parts, [tensor() for _ in parts], async_op=async_op))
            finished(group.all_to_all_single(tensor(size), tensor(size), async_op=async_op))


def messages(group, sender, receiver):
    """Send to the next rank: blocking, non-blocking, and longer than the receive."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for numel in (5, 100_000):
        send = group.isend(sender(torch.ones(numel)), right)
        group.recv(receiver(torch.zeros(numel)), left)
        send.wait()
        receive = group.irecv(receiver(torch.zeros(numel)), left)
        group.isend(sender(torch.ones(numel)), right).wait()
        receive.wait()
        send = group.isend(sender(torch.ones(numel + 1)), right)
        with pytest.raises(MpidistError, match="expected"):
            group.recv(receiver(torch.zeros(numel)), left)
        send.wait()


def payloads(group, device, patches):
    """Send a part from device memory into device memory."""
    patches.setattr(device_p2p, "device_at", lambda where: device)
    transport = Transport(group)
    transport.open_receives()
    part = device.hold(torch.ones(50_000, dtype=torch.uint8))
    transport.send((group.rank + 1) % group.size, 1, parts=[part], devices=[0])
    arrived = False
    while not arrived:
        one = transport.poll()
        arrived = one is not None and one.is_complete
    group.barrier()
    transport.close(1)
    # Its receives would match messages to the next one.
    group.barrier()


def unexpected_lengths(group, device):
    """Exchange and broadcast tensors whose lengths differ between ranks."""
    size, extra = group.size, int(group.rank == 0)
    parts = [device.hold(torch.zeros(20_000)) for _ in range(size)]
    sent = [device.hold(torch.zeros(20_000 + (extra and to != 0))) for to in range(size)]
    with contextlib.suppress(MpidistError):
        group.all_to_all(parts, sent)
    with contextlib.suppress(MpidistError):
        group.broadcast(device.hold(torch.zeros(20_000 + extra)), 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("waits_in_mpi", [True, False])
def test_the_trial_makes_every_call_that_the_library_makes_on_device_memory(
    group, device, monkeypatch, waits_in_mpi
):
    """Between devices, and between a device and the host, in both directions."""
    group._comm.device_operations["cpu"] = frozenset(trial_operations.OPERATIONS)

    def wrap(mpi):
        return mpi if waits_in_mpi else MpiCalls(mpi, wait_sleeping)

    between_devices, with_host, tried, tried_with_host = set(), set(), set(), set()
    with pytest.MonkeyPatch.context() as patches:
        watch(patches, group, device, between_devices, wrap)
        collectives(group, device, patches)
        messages(group, device.hold, device.hold)
        if waits_in_mpi:  # the transport calls MPI itself
            payloads(group, device, patches)
    with pytest.MonkeyPatch.context() as patches:
        watch(patches, group, device, with_host, wrap)
        messages(group, device.hold, lambda tensor: tensor)
        messages(group, lambda tensor: tensor, device.hold)
        unexpected_lengths(group, device)
    operand, result = trial_operations.Trial.operand, trial_operations.Trial.result

    def placed(make):
        def made(trial, number, where=None):
            tensor = make(trial, number, where)
            return device.hold(tensor) if where in (None, trial.device) else tensor

        return made

    monkeypatch.setattr(trial_operations.Trial, "operand", placed(operand))
    monkeypatch.setattr(trial_operations.Trial, "result", placed(result))
    copied = trial_operations.Trial.copied
    monkeypatch.setattr(trial_operations.Trial, "copied", lambda *args: device.hold(copied(*args)))
    for operation in trial_operations.OPERATIONS:
        seen = tried_with_host if operation in WITH_HOST else tried
        trial_operations.attempt(
            wrap(Calls(group._state.mpi, device.spans, seen)), operation, DEVICE
        )
    monkeypatch.undo()
    # Over all ranks, because a root makes other calls.
    between_devices, with_host, tried, tried_with_host = (
        set().union(*group.all_gather_object(calls))
        for calls in (between_devices, with_host, tried, tried_with_host)
    )
    made = {call for call, memory in between_devices if memory == "device"}
    missing = made - {call for call, memory in tried | tried_with_host if memory == "device"}
    agree(group, not missing, f"not tried between devices: {missing}")
    agree(group, len(made) > 5, f"the library's calls were not recorded: {made}")
    missing = with_host - tried_with_host
    agree(group, not missing, f"not tried between device and host: {missing}")


def test_the_trial_makes_every_reduction_that_mpi_does_on_device_memory():
    """Each type with each operation."""
    made = set()
    for dtype in mpi_types.datatypes():
        for operation in reduce_op.OPERATIONS:
            with contextlib.suppress(TypeError):
                plan = reduce_op.reduction(dtype, operation)
                if device_all_reduce.is_reduced_by_mpi(dtype, plan):
                    made.add((dtype, plan.combine))
    names = {"SUM": SUM, "PROD": reduce_op.PRODUCT}
    tried = {
        (getattr(torch, name), names.get(operation, operation.lower()))
        for name, (_, operations) in trial_operations.REDUCED.items()
        for operation in operations
    }
    assert made == tried
    for name, (datatype, _) in trial_operations.REDUCED.items():
        assert mpi_types.datatypes()[getattr(torch, name)] == getattr(
            trial_operations.MPI, datatype
        )
