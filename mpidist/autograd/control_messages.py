"""Messages of the engine, all one-way: gradients, and notices of passes and contexts.

::

    gradients   context, pass, number of the message whose tensors' gradients these are, whether to retain the graph; and for
                each of its tensors that needs one the gradient, or None if there is none: in a list, or itself if it is one
    notice      what, context, and what follows (``Notice``)

They name their context in their content and carry none in the header: gradients are not recorded.

Who may say what (``checks``; all else is logged and dropped):

==================
============================================================================================
gradients           the worker that the message went to; as many as its tensors, of their shape,
dtype and device DONE, FAILED        any worker, of its own part
SUMMARY             a worker that was asked, once
REPORT              a worker that has a part
ASK, AWAIT, PROBE   the worker that began the pass
STOP                that one, and those that share the context with the receiver
CLEANUP             the context's worker, and those whose requests came within it; nobody to the
context's worker ADOPT               any worker, to the context's
==================
============================================================================================

A worker of a context may begin passes in it and may fail them. What is of another form, or
gradients of another message, ends the pass at the worker that began it, if the sender has a say in
it. What a worker says of its own part is believed: a pass that waits for a part which does not
exist ends after the RPC timeout.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mpidist.errors import MpidistError
from mpidist.rpc import current
from mpidist.rpc.message import GRADIENTS, Kind


class Notice(enum.IntEnum):
    """Notices, and what follows the context in each."""

    # pass, workers that were sent gradients: the sender's part is complete; to the initiator
    DONE = 1
    FAILED = 2  # pass, description of an error (rpc.remote_error); to the initiator
    STOP = 3  # pass: it has failed; passed on to whom gradients were sent
    ASK = 4  # pass: which receives does each of your sends reach?
    SUMMARY = 5  # pass, {message: [(message, worker), …]}, workers of the context; to the initiator
    AWAIT = 6  # pass, whether to retain the graph, messages that get gradients
    PROBE = 7  # pass: is there progress?
    # pass, seconds since the last gradient, messages without one as texts, workers sent to; to the
    # initiator
    REPORT = 8
    CLEANUP = 9  # nothing: the context has ended; passed on to whom requests were sent
    ADOPT = 10  # nothing: whom the sender had this context from has died; to the context's worker


GRADIENT_KINDS = (Kind.GRADIENTS, Kind.REQUEST_GRADIENTS)
counts: Counter[str] = Counter()  # messages that this process has sent, by name


def send_gradients(
    to: int, is_back: bool, context: int, key: int, message: int, retain: bool, gradients: list[Any]
) -> None:
    """Send gradients.

    Args:
        to: The worker that sent the tensors.
        is_back: It sent them in a request: the gradients go by the device maps of answers.
        context: Its id.
        key: The number of the pass.
        message: That of the message.
        retain: Keep the graph.
        gradients: Tensors, or None.

    Raises:
        RankFailureError: It has left.
    """
    counts["GRADIENTS"] += 1
    kind = Kind.REQUEST_GRADIENTS if is_back else Kind.GRADIENTS
    content = gradients[0] if len(gradients) == 1 else gradients
    current.require().engine_messages.send(
        to, kind, content, 0, GRADIENTS.pack(context, key, message, retain)
    )


def notify(to: int, what: Notice, context: int, *rest: Any) -> None:
    """Send a notice.

    Raises:
        RankFailureError: The worker has left.
    """
    counts[what.name] += 1
    current.require().engine_messages.send(to, Kind.AUTOGRAD_NOTICE, (int(what), context, *rest), 0)


def notify_all(workers: Iterable[int], what: Notice, context: int, *rest: Any) -> None:
    """Send a notice to all of some workers that are still there; nothing once RPC has ended."""
    for to in workers:
        try:
            notify(to, what, context, *rest)
        except MpidistError:  # it has left, or RPC has been shut down
            counts[what.name] -= 1
