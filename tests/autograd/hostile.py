"""Engine without MPI, with one context that one peer shares, and an outbox for sent messages."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mpidist.autograd.context import Context
from mpidist.autograd.engine import Engine
from mpidist.autograd.passes import Pass
from mpidist.autograd.recording import Send
from mpidist.rpc.message import Kind
from mpidist.rpc.worker import WorkerInfo, Workers

ME, PEER, STRANGER, WORKERS = 0, 1, 2, 3
OWN, PEERS, NOBODYS = 7, PEER << 48 | 7, 9 << 48 | 7  # contexts
MESSAGE = 11  # sent to the peer


class Outbox:
    """Records sent messages; asserts that the receiver's rank exists."""

    def __init__(self):
        self.sent = []

    def send(self, to, kind, content, context, prefix=b""):
        assert 0 <= to < WORKERS
        self.sent.append((to, content))


def agent(outbox):
    """Return an agent with the attributes that the engine reads."""
    workers = Workers(
        [WorkerInfo(f"worker{rank}", rank) for rank in range(WORKERS)], ME, range(WORKERS)
    )
    wire = SimpleNamespace(data_only=[None] * WORKERS)
    return SimpleNamespace(workers=workers, engine_messages=outbox, allowed=None, wire=wire)


def make_engine():
    """Return an engine with a context and one sent message."""
    made = Engine()
    context = made.contexts._contexts[OWN] = Context(OWN)
    context.callees.add(PEER)
    context.leaf = leaf = torch.ones(2, 3, requires_grad=True)
    context.sends[MESSAGE] = Send(PEER, False, [leaf * 2, leaf.double().sum()])
    return made


def running(engine, mode=0, context=OWN):
    """Register a running pass of this worker in which the peer has a part, and return it."""
    made = Pass(ME << 48 | 21 | mode, context, ME)
    made.expect([PEER])
    engine.initiator._passes[made.key] = made
    return made


def notice(engine, source, what, *rest):
    """Deliver a notice to the engine and run the resulting task, if any."""
    action = engine.handle_one_way(source, Kind.AUTOGRAD_NOTICE, 0, (int(what), *rest))
    return None if action is None else action.run()


def give(engine, source, content, context=OWN, key=PEER << 48 | 33, message=MESSAGE):
    """Deliver gradients to the engine."""
    return engine.handle_one_way(
        source, Kind.GRADIENTS, 0, (context, key, message, 0, content)
    ).run()


def right():
    """Return valid gradients of the message."""
    return [torch.ones(2, 3), torch.ones((), dtype=torch.float64)]
