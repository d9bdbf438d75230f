"""Faults of torch's faulty agent, injected into the transport: delayed and dropped messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

from mpidist.comm.transport.transport import Transport
from mpidist.errors import CommTimeout
from mpidist.rpc import RpcBackendOptions, current
from mpidist.rpc.message import Kind

# torch's names of messages, and mpidist's message kinds.
KINDS = {
    "PYTHON_CALL": (Kind.CALL_PYTHON,),
    "SCRIPT_CALL": (Kind.CALL_BUILTIN, Kind.CALL_SCRIPT),
    "PYTHON_REMOTE_CALL": (Kind.REMOTE_PYTHON,),
    "SCRIPT_REMOTE_CALL": (Kind.REMOTE_BUILTIN, Kind.REMOTE_SCRIPT),
    "SCRIPT_RREF_FETCH_CALL": (Kind.RREF_FETCH,),
    "PYTHON_RREF_FETCH_CALL": (Kind.RREF_FETCH,),
    "RREF_FORK_REQUEST": (Kind.RREF_FORK,),
    "RREF_USER_DELETE": (Kind.RREF_USER_DELETE,),
    "RREF_CHILD_ACCEPT": (),
    # One-way and sent once: MPI loses no message, so that nothing is repeated.
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": (),
}


class FaultyOptions(RpcBackendOptions):
    """Options with torch's kinds of messages to drop, and delays in seconds."""

    def __init__(self, init_method, rpc_timeout, messages_to_fail, messages_to_delay):
        super().__init__(rpc_timeout=rpc_timeout, init_method=init_method, num_worker_threads=8)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay)


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Inject the faults into transports of agents with ``FaultyOptions``."""
    send = Transport.send

    def faulty_send(self, to, kind, sequence=0, *args, **kwargs):
        agent = current.agent
        options = agent.options if agent is not None else None
        if not isinstance(options, FaultyOptions):
            send(self, to, kind, sequence, *args, **kwargs)
            return
        if kind in {faulty for name in options.messages_to_fail for faulty in KINDS[name]}:
            agent.calls.fail(sequence, CommTimeout("the message was dropped"), to)
            return
        delay = max(
            (s for name, s in options.messages_to_delay.items() if kind in KINDS[name]), default=0.0
        )
        if delay:
            # Later messages overtake it, as in torch's agent.
            timer = threading.Timer(
                delay,
                lambda: agent.wire.is_stopped or send(self, to, kind, sequence, *args, **kwargs),
            )
            timer.daemon = True
            timer.start()
        else:
            send(self, to, kind, sequence, *args, **kwargs)

    with mock.patch.object(Transport, "send", faulty_send):
        yield
