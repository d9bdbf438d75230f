"""Messages of the engine, all one-way: gradients, and notices of passes and contexts.

::

    gradients   context, pass, number of the message that carried the tensors, retain_graph, and
                a gradient or None for each of its tensors that needs one (a list, or the one
                gradient itself)
    notice      kind, context, and the fields of the kind (``Notice``)

The header carries no context, so gradients are not recorded; the content names the context.

Permitted senders (``checks`` drops and logs all other messages):

=================  ================================================================
gradients          the receiver of the message; as many as its tensors, with their
                   shapes, dtypes and devices
DONE, FAILED       any worker, about its own part
SUMMARY            a worker that was asked, once
REPORT             a worker that has a part
ASK, AWAIT, PROBE  the initiator of the pass
STOP               the initiator, and workers that share the context with the receiver
CLEANUP            the context's owner and callers of the receiver; never to the owner
ADOPT              any worker, to the context's owner
=================  ================================================================

A worker of a context may begin passes in the context and may fail them. A malformed message, or
gradients of another message, ends the pass at its initiator if the sender has a part in it.
Reports about a sender's own part are not verified: a pass that waits for a part which does not
exist ends after the RPC timeout.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

from mpidist.autograd.recording import Gradient
from mpidist.errors import MpidistError
from mpidist.rpc import current
from mpidist.rpc.message import GRADIENTS, Kind


class Notice(enum.IntEnum):
    """Kinds of notices; the comments list the fields after the context."""

    # The sender's part is complete; to the initiator. Pass, ranks that were sent gradients.
    DONE = 1
    # The sender's part has failed; to the initiator. Pass, description of an rpc.remote_error.
    FAILED = 2
    # The pass has failed; forwarded to ranks that were sent gradients. Pass.
    STOP = 3
    # Request for a summary; from the initiator. Pass.
    ASK = 4
    # Answer to ASK. Pass, {sent message: [(received message, sender), …]}, ranks of the context.
    SUMMARY = 5
    # Start of a SMART part; from the initiator. Pass, retain_graph, messages that get gradients.
    AWAIT = 6
    # Request for a report; from the initiator. Pass.
    PROBE = 7
    # Answer to PROBE. Pass, seconds since the last gradient, texts about messages without
    # gradients, ranks that were sent gradients.
    REPORT = 8
    # The context has ended; forwarded to ranks that were sent requests. No fields.
    CLEANUP = 9
    # The sender's only caller within the context has died; to the context's owner. No fields.
    ADOPT = 10


GRADIENT_KINDS = (Kind.GRADIENTS, Kind.REQUEST_GRADIENTS)
counts: Counter[str] = Counter()  # sent messages by kind


def send_gradients(
    to: int,
    is_back: bool,
    context: int,
    key: int,
    message: int,
    retain: bool,
    gradients: Sequence[Gradient],
) -> None:
    """Send gradients to the worker that sent the tensors.

    Args:
        to: Rank of that worker.
        is_back: The tensors were in a request, so the device maps of answers apply.
        context: Number of the context.
        key: Number of the pass.
        message: Number of the message with the tensors.
        retain: Keep the graph.
        gradients: Tensors, or None.

    Raises:
        RankFailureError: The worker has left.
    """
    counts["GRADIENTS"] += 1
    kind = Kind.REQUEST_GRADIENTS if is_back else Kind.GRADIENTS
    content = gradients[0] if len(gradients) == 1 else gradients
    current.require().engine_messages.send(
        to, kind, content, 0, GRADIENTS.pack(context, key, message, retain)
    )


def notify(to: int, what: Notice, context: int, *rest: object) -> None:
    """Send a notice.

    Raises:
        RankFailureError: The worker has left.
    """
    counts[what.name] += 1
    current.require().engine_messages.send(to, Kind.AUTOGRAD_NOTICE, (int(what), context, *rest), 0)


def notify_all(workers: Iterable[int], what: Notice, context: int, *rest: object) -> None:
    """Send a notice to several workers; skip those that have left, and all once RPC has ended."""
    for to in workers:
        try:
            notify(to, what, context, *rest)
        except MpidistError:
            counts[what.name] -= 1
