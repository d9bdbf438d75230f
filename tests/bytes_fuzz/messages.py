"""Whole messages to a worker with a list: transport, agent, requests and answers, without MPI.

All run in one thread. A case is an eager message of ``comm.transport`` and the bytes of its
payloads::

    eager bytes u16 | the eager message | for each payload: bytes u32, and these
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable
from typing import Any

import torch

from mpidist.autograd import control_messages
from mpidist.comm.memory import buffer
from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.transport import (
    eager_message,
    eager_receives,
    payload_receives,
    sends,
    transport,
)
from mpidist.comm.transport.transport import Transport
from mpidist.errors import CommTimeout
from mpidist.rpc import current, rref
from mpidist.rpc.agent import Agent
from mpidist.rpc.message import GRADIENTS, PAIR, WORD, Kind, pack_forks
from mpidist.rpc.names import callee
from mpidist.rpc.names.allowlist import Allowed
from mpidist.rpc.options import RpcBackendOptions
from mpidist.rpc.serving import methods
from mpidist.rpc.threads.call import Call
from mpidist.rpc.threads.pool import HANDLED
from mpidist.rpc.values import codec, remote_error
from mpidist.rpc.worker import WorkerInfo, Workers
from tests.bytes_fuzz.network import LENGTH, Mpi, Network, group
from tests.rpc import hostile

SIZE, SENDER, READER = 3, 1, 0
_AGENT_CASES = 400  # cases of one agent, so that its state is bounded
_ASKED_EVERY = 50  # cases after which a listed function must be answered

# MPI is not started.
for _module in (transport, sends, eager_receives, payload_receives, mpi_errors, buffer):
    _module.MPI = Mpi


class _Worker:
    """One agent without threads.

    Args:
        rank: Of the worker.
        is_listed: The worker has a list.
    """

    def __init__(self, rank: int, is_listed: bool) -> None:
        self.network = Network()
        infos = [WorkerInfo(f"worker{number}", number) for number in range(SIZE)]
        carrier = Transport(group(self.network, rank, SIZE))
        carrier.generation = 1
        if is_listed:
            carrier.open_receives()
        workers = Workers(infos, rank, range(SIZE), {READER})
        allowed = Allowed(hostile.LISTED) if is_listed else None
        self.agent = Agent(
            carrier, workers, [{}] * SIZE, RpcBackendOptions(), allowed, rref.from_wire
        )
        self.tasks: list[Any] = []
        self.agent.polling.pool.submit = self.tasks.append
        self.agent.polling.wait = _refuse_to_wait

    def take(self, eager: bytes, payloads: bytes = b"") -> None:
        """Receive a message, and execute everything it requests."""
        current.agent = self.agent
        self.network.arrived.append((SENDER, eager))
        self.network.payloads = payloads
        for _ in range(4):  # a message with payloads is returned twice
            action = self.agent.dispatcher.poll(1)
            if action is not None and action is not HANDLED:
                action.run()
            while self.tasks:
                self.tasks.pop(0).run()

    def pending(self, number: int) -> Call:
        """Return a call that waits for an answer of the sender."""
        call = Call(SENDER, "a call", 0)
        call.sequence = number
        self.agent.calls._pending[number] = call
        return call


def _refuse_to_wait(call: Call) -> None:
    raise CommTimeout("nobody waits here")


def samples() -> list[bytes]:
    """Return valid messages of every kind, as a sender encodes them."""
    sender = _Worker(SENDER, False)
    agent, network = sender.agent, sender.network
    infos, data_only = agent.workers.infos, agent.wire.data_only[READER]
    current.agent = agent
    calls, tensor = agent.calls, torch.ones(3)
    reference = rref.user_rref(agent, agent.workers.infos[READER], 1 << 40, 1 << 40 | 1, None)
    written: list[bytes] = []

    def noted(send: Callable[[], Any]) -> None:
        del network.sent[:]
        try:
            send()
        except CommTimeout:
            pass
        eager = [data for _, tag, data in network.sent if tag == Tag.EAGER][-1]
        payloads = b"".join(
            LENGTH.pack(len(data)) + data for _, tag, data in network.sent if tag != Tag.EAGER
        )
        written.append(struct.pack("<H", len(eager)) + eager + payloads)

    def called(function: Any, *args: Any, **kwargs: Any) -> None:
        noted(lambda: calls.invoke(READER, function, args, kwargs, 0))

    called(hostile.echo)
    called(hostile.echo, 1, "two", 3.0, None, x=(1, 2), y={"a": [1]})
    called(hostile.touched, tensor)
    called(
        hostile.touched,
        tensor,
        torch.ones(40, 40, dtype=torch.bool),
        torch.eye(3).to_sparse(),
        torch.ones(2, 2).t(),
    )
    called(hostile.touched, torch.ones(9000), tensor)
    called(hostile.echo, reference, [reference], "x")
    called(hostile.Box, 1)
    called(
        hostile.echo,
        hostile.Box,
        infos[1],
        {1, 2},
        1 << 70,
        1 + 2j,
        torch.float32,
    )
    called(torch.add, tensor, 1)
    called(callee.method("get"), reference)
    called(methods.has_method, reference, "get")
    noted(lambda: calls.request(READER, Kind.RREF_FETCH, WORD.pack(1 << 40), None, 0, "a fetch"))
    noted(lambda: agent.references.create(READER, hostile.Box, (1,), {}, 0))
    noted(lambda: agent.references.create(READER, callee.method("get"), (reference,), {}, 0))
    noted(
        lambda: agent.wire.post(
            READER,
            Kind.BACKWARD_AUTOGRAD,
            1,
            0,
            b"",
            codec.encode((reference, 5, False, "fast"), data_only),
        )
    )
    for kind, obj in (
        (Kind.RESULT, [1, "two", tensor]),
        (Kind.RESULT, None),
        (Kind.RESULT, (reference, 1)),
        (Kind.REMOTE_DONE, None),
    ):
        noted(
            lambda kind=kind, obj=obj: agent.wire.answer(
                READER, kind, 1, 0, codec.encode(obj, data_only)
            )
        )
    described = codec.encode(remote_error.describe(ValueError("text", 1), True), data_only)
    noted(lambda: agent.wire.answer(READER, Kind.EXCEPTION, 2, 0, described))
    for kind, words in (
        (Kind.RREF_FORK, pack_forks(0, [(1 << 40, 1 << 40 | 3)])),
        (Kind.RREF_USER_DELETE, PAIR.pack(1 << 40, 3)),
        (Kind.QUIET_REPORT, struct.pack("<5Q", 0, 1, 1, 0, 0)),
        (Kind.QUIET_VERDICT, struct.pack("<2Q", 0, 1)),
        (Kind.LEAVE, b""),
    ):
        noted(lambda kind=kind, words=words: agent.wire.post(READER, kind, 0, 0, words))
    noted(
        lambda: control_messages.send_gradients(READER, False, 1 << 48, 1 << 48, 1, False, [tensor])
    )
    noted(
        lambda: control_messages.send_gradients(
            READER, True, 1 << 48, 1 << 48, 1, False, [tensor, None]
        )
    )
    for what in control_messages.Notice:
        noted(lambda what=what: control_messages.notify(READER, what, 1 << 48, 1 << 48, (1, 2)))
    noted(lambda: agent.wire.post(READER, Kind.CALL_PYTHON, 9, 1 << 48, *_call(tensor)))
    assert len(GRADIENTS.pack(0, 0, 0, 0)) == GRADIENTS.size
    # The next case with payloads continues it.
    continued = eager_message.FIXED.pack(1, 0, 1 | eager_message.CONTINUED, 1, 9, 0, 0, 0)
    continued += struct.pack("<Q", 20)
    written.append(struct.pack("<H", len(continued)) + continued + LENGTH.pack(20) + bytes(20))
    return written


def _call(tensor: torch.Tensor) -> tuple[bytes, Any]:
    _, name = callee.wire_name(hostile.echo)
    return name, codec.encode_function(hostile.echo, name, (tensor,), {}, "worker0")


class _Reading:
    """The worker that reads, and its number of cases."""

    worker: _Worker | None = None
    cases = 0


def check(case: bytes) -> None:
    """Receive a case as a message: nothing raises, only listed functions run, the worker lives."""
    if _Reading.worker is None or _Reading.cases % _AGENT_CASES == 0:
        if _Reading.worker is not None:
            current.agent = _Reading.worker.agent
            _Reading.worker.agent.references.store.clear()
        logger = logging.getLogger("mpidist")
        logger.handlers[:] = [hostile.log]
        logger.propagate = False
        _Reading.worker = _Worker(READER, True)
    worker = _Reading.worker
    _Reading.cases += 1
    del hostile.log.texts[:], worker.network.sent[:]
    fired, threads = len(hostile.fired), worker.agent.polling.pool.counts()
    waiting = [worker.pending(number) for number in (1, 2)]
    length = int.from_bytes(case[:2], "little")
    worker.take(case[2 : 2 + length], case[2 + length :])
    for call in waiting:
        if call.done:
            _read_answer(worker.agent, call)
    assert len(hostile.fired) == fired, f"code ran that is not listed: {hostile.fired[fired:]}"
    assert worker.agent.polling.pool.counts() == threads
    if _Reading.cases % _ASKED_EVERY == 0:
        _require_alive(worker)


def _read_answer(agent: Agent, call: Call) -> None:
    # An answer may be an exception of Python or of mpidist, but not one that ends a program.
    with contextlib.suppress(Exception):
        agent.calls.result(call)


def _require_alive(worker: _Worker) -> None:
    """Require that the worker answers a listed call."""
    del worker.network.sent[:]
    name = hostile.ECHO.encode()
    header = struct.pack("<H", len(name)) + name + b"\x91\x07"
    worker.take(struct.pack("<BBHIQQII", Kind.CALL_PYTHON, 0, 0, 1, 77, 0, len(header), 0) + header)
    answers = [data for to, tag, data in worker.network.sent if to == SENDER and tag == Tag.EAGER]
    assert (
        len(answers) == 1
        and answers[0][0] == Kind.RESULT
        and answers[0][8:16] == struct.pack("<Q", 77)
    ), answers
