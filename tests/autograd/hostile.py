"""An engine without MPI: a context of its own that one peer shares, with a message in it, and a box for what it sends."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mpidist.autograd.context import Context
from mpidist.autograd.engine import Engine
from mpidist.autograd.passes import Pass
from mpidist.autograd.recording import Send
from mpidist.rpc import codec
from mpidist.rpc.message import Kind
from mpidist.rpc.worker import WorkerInfo, Workers

ME, PEER, STRANGER, WORKERS = 0, 1, 2, 3
OWN, PEERS, NOBODYS = 7, PEER << 48 | 7, 9 << 48 | 7  # contexts
MESSAGE = 11  # that this worker has sent to its peer


class Outbox:
    """Takes what the engine sends; a rank that does not exist would end the job."""

    def __init__(self):
        self.sent = []

    def send(self, to, kind, content, context, prefix=b""):
        assert 0 <= to < WORKERS
        self.sent.append((to, content))


def agent(outbox):
    """Return what the engine needs of an agent."""
    workers = Workers(
        [WorkerInfo(f"worker{rank}", rank) for rank in range(WORKERS)], ME, range(WORKERS)
    )
    wire = SimpleNamespace(codecs=[codec] * WORKERS)
    return SimpleNamespace(workers=workers, engine_messages=outbox, allowed=None, wire=wire)


def make_engine():
    """Return the engine."""
    made = Engine()
    context = made.contexts._contexts[OWN] = Context(OWN)
    context.callees.add(PEER)
    context.leaf = leaf = torch.ones(2, 3, requires_grad=True)
    context.sends[MESSAGE] = Send(PEER, False, [leaf * 2, leaf.double().sum()])
    return made


def running(engine, mode=0, context=OWN):
    """Have a pass of this worker under way in which the peer has a part; return it."""
    made = Pass(ME << 48 | 21 | mode, context, ME)
    made.expect([PEER])
    engine.initiator._passes[made.key] = made
    return made


def notice(engine, source, what, *rest):
    """Have the engine take a notice, and do what is left to do."""
    action = engine.handle_one_way(source, Kind.AUTOGRAD_NOTICE, 0, (int(what), *rest))
    return None if action is None else action.run()


def give(engine, source, content, context=OWN, key=PEER << 48 | 33, message=MESSAGE):
    """Have the engine take gradients."""
    return engine.handle_one_way(
        source, Kind.GRADIENTS, 0, (context, key, message, 0, content)
    ).run()


def right():
    """Return gradients of the message."""
    return [torch.ones(2, 3), torch.ones((), dtype=torch.float64)]
