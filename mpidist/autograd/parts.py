"""This worker's parts of backward passes: begun by the first gradient or by the initiator, ended by the last or by an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpidist.autograd import checks
from mpidist.autograd.checks import initiator_of
from mpidist.autograd.context import SMART, Context, Contexts, unknown_context
from mpidist.autograd.control_messages import Notice, notify, notify_all, send_gradients
from mpidist.autograd.dependencies import ROOTS, Plan
from mpidist.autograd.local_pass import LocalPass
from mpidist.autograd.recording import Edge, Node
from mpidist.autograd.single_node import Gradient
from mpidist.autograd.smart import summary
from mpidist.errors import FrameError, RankFailureError
from mpidist.rpc import current

_MAX_PLANS = 64  # of one context, asked for and not begun: each is as large as the graph


def plan_of(context: Context, roots: Sequence[Edge] | None = None) -> Plan:
    """Plan a pass from all sends of a context, and from the roots at the initiator."""
    sources: dict[int, Sequence[Edge]] = {} if roots is None else {ROOTS: roots}
    # Other threads may record a send meanwhile.
    for message, send in list(context.sends.items()):
        sources[message] = send.next_functions
    return Plan(sources)


class Parts:
    """The parts of all passes.

    Args:
        contexts: Of this worker.
        complete: Called for a part of a pass that began here, with (pass, workers sent to).
        fail: Called for an error in one, with (pass, error).
    """

    def __init__(
        self,
        contexts: Contexts,
        complete: Callable[[int, Iterable[int]], None],
        fail: Callable[[int, BaseException], None],
    ) -> None:
        self._contexts = contexts
        self._complete = complete
        self._fail = fail

    def receive_gradients(self, source: int, content: Sequence[Any]) -> None:
        """Take a message of gradients; in FAST mode the first of a pass begins this worker's part.

        Raises:
            FrameError: They are not those of a message that this worker has sent to the source. The
                pass fails with it, unless the source does not share the context.
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
            if key & SMART:  # what to await is still under way
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
        """Begin a part, and give it what has come already; None if the pass has failed meanwhile."""
        with context.lock:
            if key in context.stopped or context.is_released:
                return None
            part = context.parts[key] = LocalPass(self, context, key, retain, plan, awaited)
            early = context.early.pop(key, ())
        for message, gradients in early:
            self.deliver(part, message, gradients)
        return part

    def deliver(self, part: LocalPass, name: int, gradients: Sequence[Gradient]) -> None:
        """Give a part the gradients of one source; an error ends the pass."""
        try:
            part.deliver(name, gradients)
        except BaseException as error:
            self.abort(part.context, part.key, error)

    # SMART mode.

    def answer_survey(self, number: int, key: int) -> None:
        """Tell the initiator which receives each send of a context reaches."""
        context = self._contexts.find(number)
        if context is None:
            # The first request of the context is still under way, from another worker: no root
            # depends on it.
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
        """Begin a part with the sends that get gradients, if any."""
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

    # What a part yields.

    def send(self, part: LocalPass, node: Node, gradients: list[Gradient]) -> None:
        """Send the gradients of received tensors to the worker that they came from."""
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
        """Tell the initiator that a part is complete."""
        with part.context.lock:
            part.context.completed.add(part.key)
            part.context.parts.pop(part.key, None)
        if initiator_of(part.key) == current.require().workers.me.id:
            self._complete(part.key, part.sent_to)
        else:
            notify(
                initiator_of(part.key),
                Notice.DONE,
                part.context.number,
                part.key,
                tuple(part.sent_to),
            )

    # Errors.

    def abort(self, context: Context, key: int, error: BaseException) -> None:
        """End a pass because of an error on this worker."""
        self.stop(context, key)
        self.report_failure(context.number, key, error)

    def report_failure(self, number: int, key: int, error: BaseException) -> None:
        """Tell the initiator of an error."""
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
                agent.wire.codecs[initiator].describe_error(error),
            )

    def stop(self, context: Context, key: int) -> None:
        """End a part of a failed pass, and those of the workers that it has sent gradients to.

        Again does nothing.
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
        """End all parts of a context that has ended."""
        for key in list(context.parts):
            part = context.parts.pop(key, None)
            if part is not None:
                part.stop()
                self.report_failure(context.number, key, unknown_context(context.number))

    def worker_left(self, rank: int, error: RankFailureError) -> None:
        """End the passes of contexts that are shared with a worker that has left."""
        for context in self._contexts.values():
            if context.parts and rank in context.peers():
                for key in list(context.parts):
                    self.abort(context, key, error)

    # Progress.

    def report(self, number: int, key: int) -> tuple[float, list[str], set[int]]:
        """Return the seconds since a part has had a gradient, what it waits for, and the workers it has sent gradients to.

        A part that is not there makes no progress: it has ended, and its end is told, or what would
        begin it was lost.
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
        since = part.since  # read first: of a part that is busy it is the time of the reading
        return time.monotonic() - since, texts, set(part.sent_to)
