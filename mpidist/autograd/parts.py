"""Parts of backward passes on this worker.

The first gradient begins a part in FAST mode, the initiator's message in SMART mode. A part ends
with its last gradient, or with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.autograd.graph import Node

from mpidist.autograd import checks
from mpidist.autograd.checks import initiator_of
from mpidist.autograd.context import SMART, Context, Contexts, unknown_context
from mpidist.autograd.control_messages import Notice, notify, notify_all, send_gradients
from mpidist.autograd.dependencies import ROOTS, Plan
from mpidist.autograd.local_pass import LocalPass
from mpidist.autograd.recording import Edge, Gradient
from mpidist.autograd.smart import summary
from mpidist.errors import FrameError, RankFailureError
from mpidist.rpc import current
from mpidist.rpc.values import remote_error

# Plans of one context that have not begun; each is as large as the graph.
_MAX_PLANS = 64


def plan_of(context: Context, roots: Sequence[Edge] | None = None) -> Plan:
    """Plan a pass from all sends of a context, and from the roots at the initiator."""
    sources: dict[int, Sequence[Edge]] = {} if roots is None else {ROOTS: roots}
    # Other threads may record a send meanwhile, within a list of the items, too.
    for message, send in context.sends.copy().items():
        sources[message] = send.next_functions
    return Plan(sources)


class Parts:
    """The parts of all passes on this worker.

    Args:
        contexts: Contexts of this worker.
        complete: Called with (this worker's rank, context, pass, ranks that were sent gradients)
            when the part of a pass that began on this worker is complete.
        fail: Called with (pass, error) when such a part fails.
    """

    def __init__(
        self,
        contexts: Contexts,
        complete: Callable[[int, int, int, Iterable[int]], None],
        fail: Callable[[int, BaseException], None],
    ) -> None:
        self._contexts = contexts
        self._complete = complete
        self._fail = fail

    def receive_gradients(self, source: int, content: Sequence[Any]) -> None:
        """Deliver a message of gradients; in FAST mode the first one of a pass begins the part.

        Raises:
            FrameError: The gradients belong to no message that this worker has sent to the source.
                The pass fails with this error if the source shares the context.
        """
        number, key, message, flag, gradients = content
        workers = len(current.require().workers.infos)
        checks.number(number, "context", workers)
        checks.number(key, "pass", workers)
        if type(gradients) is not list:
            gradients = [gradients]
        context = self._contexts.find(number)
        if context is None:
            self.report_failure(number, key, unknown_context(number))
            return
        if source not in context.callees and source not in context.callers:
            raise FrameError(
                f"rank {source} sent gradients of context {number}, which it does not share"
            )
        try:
            checks.gradients(context.sends.get(message), source, message, gradients)
            part = context.parts.get(key)
            if part is None:
                part = self._first_contact(context, key, bool(flag), message, gradients)
        except FrameError as error:
            self.abort(context, key, error)
            raise
        except Exception as error:
            self.abort(context, key, error)
            return
        if part is not None:
            self.deliver(part, message, gradients)

    def _first_contact(
        self, context: Context, key: int, retain: bool, message: int, gradients: Sequence[Gradient]
    ) -> LocalPass | None:
        with context.lock:
            part: LocalPass | None = context.parts.get(key)
            if part is not None or key in context.stopped or context.is_released:
                return part
            if key in context.completed:
                raise FrameError(
                    f"gradients of message {message} for pass {key}, whose part here is over"
                )
            # In SMART mode the initiator's AWAIT has not arrived yet.
            if key & SMART:
                context.early.setdefault(key, []).append((message, gradients))
                return None
            part = context.parts[key] = LocalPass(self, context, key, retain, plan_of(context))
            return part

    def begin(
        self,
        context: Context,
        key: int,
        retain: bool,
        plan: Plan,
        awaited: Iterable[int] | None = None,
    ) -> LocalPass | None:
        """Begin a part and deliver early gradients; return None if the pass has failed."""
        with context.lock:
            if key in context.stopped or context.is_released:
                return None
            part = context.parts[key] = LocalPass(self, context, key, retain, plan, awaited)
            early = context.early.pop(key, ())
        for message, gradients in early:
            self.deliver(part, message, gradients)
        return part

    def deliver(self, part: LocalPass, name: int, gradients: Sequence[Gradient]) -> None:
        """Deliver the gradients of one source to a part; an error ends the pass."""
        try:
            part.deliver(name, gradients)
        except BaseException as error:
            self.abort(part.context, part.key, error)

    # SMART mode.

    def answer_survey(self, number: int, key: int) -> None:
        """Send the initiator the receives that each send of a context reaches."""
        context = self._contexts.find(number)
        if context is None:
            # The first request within the context has not arrived yet, so no root depends on it.
            notify_all([initiator_of(key)], Notice.SUMMARY, number, key, {}, ())
            return
        try:
            if len(context.plans) >= _MAX_PLANS:
                raise FrameError(
                    f"{len(context.plans)} passes have asked context {number} for its plan, and "
                    "not begun"
                )
            plan = plan_of(context)
            found = summary(plan, context.receives)
        except Exception as error:
            self.abort(context, key, error)
            return
        context.plans[key] = plan
        notify_all([initiator_of(key)], Notice.SUMMARY, number, key, found, tuple(context.peers()))

    def begin_awaited(self, number: int, key: int, retain: bool, awaited: Sequence[int]) -> None:
        """Begin a part of a SMART pass with the sends that get gradients, if any."""
        context = self._contexts.find(number)
        plan = context.plans.pop(key, None) if context is not None else None
        if not awaited:
            return
        if context is None:
            self.report_failure(number, key, unknown_context(number))
        elif plan is None:
            if key not in context.stopped:
                self.abort(
                    context,
                    key,
                    FrameError(f"pass {key} awaits gradients, and has not asked which there are"),
                )
        else:
            try:
                self.begin(context, key, retain, plan, awaited)
            except Exception as error:
                self.abort(context, key, error)

    # Results of a part.

    def send(self, part: LocalPass, node: Node, gradients: list[Gradient]) -> None:
        """Send the gradients of received tensors to the worker that sent the tensors."""
        receive = part.context.receives[node]
        part.sent_to.add(receive.source)
        send_gradients(
            receive.source,
            not receive.is_answer,
            part.context.number,
            part.key,
            receive.message,
            part.retain,
            gradients,
        )

    def complete(self, part: LocalPass) -> None:
        """Report a complete part to the initiator."""
        with part.context.lock:
            part.context.completed.add(part.key)
            part.context.parts.pop(part.key, None)
        initiator, number = initiator_of(part.key), part.context.number
        if initiator == current.require().workers.me.id:
            self._complete(initiator, number, part.key, part.sent_to)
        else:
            notify(initiator, Notice.DONE, number, part.key, tuple(part.sent_to))

    # Errors.

    def abort(self, context: Context, key: int, error: BaseException) -> None:
        """Stop this worker's part because of an error, and report the error to the initiator."""
        self.stop(context, key)
        self.report_failure(context.number, key, error)

    def report_failure(self, number: int, key: int, error: BaseException) -> None:
        """Report an error to the initiator."""
        agent = current.agent
        if agent is None:
            return
        if initiator_of(key) == agent.workers.me.id:
            self._fail(key, error)
        else:
            initiator = initiator_of(key)
            notify_all(
                [initiator],
                Notice.FAILED,
                number,
                key,
                remote_error.describe(error, agent.wire.data_only[initiator] is not None),
            )

    def stop(self, context: Context, key: int) -> None:
        """Stop a part of a failed pass, and send STOP to the workers that it sent gradients to.

        A second call has no effect.
        """
        with context.lock:
            if key in context.stopped:
                return
            context.stopped.add(key)
            part = context.parts.pop(key, None)
            context.plans.pop(key, None)
            context.early.pop(key, None)
        if part is not None:
            part.stop()
            agent = current.agent
            if agent is not None:
                notify_all(
                    part.sent_to - {agent.workers.me.id, initiator_of(key)},
                    Notice.STOP,
                    context.number,
                    key,
                )

    def stop_all(self, context: Context) -> None:
        """Stop all parts of a context that has ended."""
        for key in list(context.parts):
            part = context.parts.pop(key, None)
            if part is not None:
                part.stop()
                self.report_failure(context.number, key, unknown_context(context.number))

    def worker_left(self, rank: int, error: RankFailureError) -> None:
        """Fail the passes of contexts shared with a worker that has left."""
        for context in self._contexts.values():
            if context.parts and rank in context.peers():
                for key in list(context.parts):
                    self.abort(context, key, error)

    # Progress.

    def report(self, number: int, key: int) -> tuple[float, list[str], set[int]]:
        """Return a part's idle time in seconds, the gradients that it lacks, and ranks sent to.

        The idle time of a missing part is infinite: the part has ended and reported its end, or
        the message that would begin it was lost.
        """
        context = self._contexts.find(number)
        part: LocalPass | None = context.parts.get(key) if context is not None else None
        if context is None or part is None:
            return float("inf"), [], set()
        infos = current.require().workers.infos
        texts = []
        for name in part.missing():
            send = context.sends.get(name)
            if send is not None:
                what = "the result of a call from" if send.is_answer else "arguments of a call to"
                texts.append(
                    f"the gradients of {what} {infos[send.to].name} (shapes {send.shapes()})"
                )
        # Read before the clock, because ``since`` of a busy part is the current time.
        since = part.since
        return time.monotonic() - since, texts, set(part.sent_to)
